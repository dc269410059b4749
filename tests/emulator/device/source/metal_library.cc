// Compile options, libraries, function constants, functions and compute pipelines. The compiling itself is the core's.
#include <algorithm>
#include <cstring>

#include "metal.h"

namespace device {

void on_new_thread(void (*work)(void*), void* argument);  // metal_device.cc

namespace {

constexpr const char* kLibraryDomain = "MTLLibraryErrorDomain";
constexpr const char* kPipelineDomain = "AGXMetalG13X";  // the driver's own, as on an M1

// Takes what the core allocated.
std::string taken(char* text) {
  std::string out = text ? text : "";
  emu_string_free(text);
  return out;
}

struct OsLanguage {
  int os;
  uint64_t newest;
};
constexpr OsLanguage kLanguages[] = {
    {os_version(26), MTL::LanguageVersion4_0}, {os_version(15), MTL::LanguageVersion3_2}, {os_version(14), MTL::LanguageVersion3_1},
    {os_version(13), MTL::LanguageVersion3_0}, {os_version(12), MTL::LanguageVersion2_4}, {os_version(11), MTL::LanguageVersion2_3},
};

uint64_t newest_language() {
  for (const OsLanguage& known : kLanguages)
    if (option(METAL_OPTION_OS_VERSION) >= known.os) return known.newest;
  return MTL::LanguageVersion2_2;
}

std::string version_text(uint64_t version) { return std::to_string(version >> 16) + "." + std::to_string(version & 0xFFFF); }

// Bytes of one value of a scalar or vector type; 0 for what cannot be a function constant.
uint64_t size_of(uint64_t type) {
  struct Group {
    uint64_t first, bytes;
  };
  constexpr Group groups[] = {{3, 4}, {16, 2}, {29, 4}, {33, 4}, {37, 2}, {41, 2}, {45, 1}, {49, 1}, {53, 1}, {81, 8}, {85, 8}, {121, 2}};
  for (const Group& group : groups)
    if (type >= group.first && type < group.first + 4) {
      const uint64_t lanes = type - group.first + 1;
      return group.bytes * (lanes == 3 ? 4 : lanes);
    }
  return 0;
}

struct OptionsMethods : CompileOptions {
  bool get_fast() const { return fast_math; }
  void set_fast(bool value) {
    fast_math = value;
    math_mode = value ? MTL::MathModeFast : MTL::MathModeSafe;
  }
  int64_t get_mode() const { return math_mode; }
  void set_mode(int64_t value) {
    if (value < MTL::MathModeSafe || value > MTL::MathModeFast) report("bad-value", "setMathMode: " + std::to_string(value), this);
    math_mode = value;
    fast_math = value != MTL::MathModeSafe;
  }
  int64_t get_functions() const { return math_functions; }
  void set_functions(int64_t value) { math_functions = value; }
  uint64_t get_version() const { return language_version ? language_version : newest_language(); }
  void set_version(uint64_t value) { language_version = value; }
  Dictionary* get_macros() const { return macros.get(); }
  void set_macros(Dictionary* value) { macros.set(value); }
  bool get_invariance() const { return preserve_invariance; }
  void set_invariance(bool value) { preserve_invariance = value; }
  int64_t get_type() const { return library_type; }
  void set_type(int64_t value) {
    if (value != MTL::LibraryTypeExecutable) fail("dynamic Metal libraries are not modelled");
    library_type = value;
  }
  int64_t get_optimisation() const { return optimisation; }
  void set_optimisation(int64_t value) { optimisation = value; }
  uint64_t get_max_threads() const { return max_threads; }
  void set_max_threads(uint64_t value) { max_threads = value; }
  String* get_install_name() const { return install_name.get(); }
  void set_install_name(String* value) { install_name.set(value); }
  CompileOptions* copy() const {
    auto* made = make<CompileOptions>();
    made->fast_math = fast_math;
    made->math_mode = math_mode;
    made->math_functions = math_functions;
    made->language_version = language_version;
    made->preserve_invariance = preserve_invariance;
    made->optimisation = optimisation;
    made->macros = macros;
    made->install_name = install_name;
    made->max_threads = max_threads;
    return made;
  }
};

struct ValuesMethods : ConstantValues {
  void put(const void* data, uint64_t type, uint64_t index, std::string name, const char* what) {
    const uint64_t bytes = size_of(type);
    if (!bytes) {
      report("constant-type", std::string(what) + ": data type " + std::to_string(type) + " cannot be a function constant", this);
      return;
    }
    if (!data) {
      report("null-argument", std::string(what) + " was given a null pointer", this);
      return;
    }
    auto same = [&](const ConstantValue& known) { return known.name == name && (!name.empty() || known.index == index); };
    values.erase(std::remove_if(values.begin(), values.end(), same), values.end());
    values.push_back({std::move(name), index, type, std::string(static_cast<const char*>(data), bytes)});
  }
  void set_index(const void* data, uint64_t type, uint64_t index) {
    if (index > 65535) {
      report("constant-index", "setConstantValue:type:atIndex: index " + std::to_string(index) + " is above 65535", this);
      return;
    }
    put(data, type, index, "", "setConstantValue:type:atIndex:");
  }
  void set_name(const void* data, uint64_t type, String* name) { put(data, type, 0, str(name), "setConstantValue:type:withName:"); }
  void set_range(const void* data, uint64_t type, NS::Range range) {
    for (uint64_t i = 0; i < range.length; ++i)
      put(static_cast<const char*>(data) + i * size_of(type), type, range.location + i, "", "setConstantValues:type:withRange:");
  }
  void clear() { values.clear(); }
  ConstantValues* copy() const {
    auto* made = make<ConstantValues>();
    made->values = values;
    return made;
  }
};

struct DescriptorMethods : FunctionDescriptor {
  String* get_name() const { return name.get(); }
  void set_name(String* value) { name.set(value); }
  String* get_specialized() const { return specialized_name.get(); }
  void set_specialized(String* value) { specialized_name.set(value); }
  ConstantValues* get_constants() const { return constants.get(); }
  void set_constants(ConstantValues* value) { constants.set(value); }
  uint64_t get_options() const { return options; }
  void set_options(uint64_t value) { options = value; }
  FunctionDescriptor* copy() const {
    auto* made = make<FunctionDescriptor>();
    made->name = name;
    made->specialized_name = specialized_name;
    made->constants = constants;
    made->options = options;
    return made;
  }
  static Object* made(Class*) { return autoreleased(static_cast<Object*>(make<FunctionDescriptor>())); }
};

emu_pipeline* compile(const Function* function, uint64_t max_threads, bool checked, std::string& message) {
  std::vector<emu_constant_value> constants;
  for (const ConstantValue& value : function->constants)
    constants.push_back({value.name.empty() ? nullptr : value.name.c_str(), static_cast<uint32_t>(value.index),
                         static_cast<uint32_t>(value.type), value.data.data()});
  emu_pipeline_options options{};
  options.size = sizeof options;
  options.function = function->plain_name.c_str();
  options.constants = constants.data();
  options.constant_count = constants.size();
  options.simd_width = static_cast<uint32_t>(option(METAL_OPTION_SIMD_WIDTH));
  options.max_total_threads = static_cast<uint32_t>(max_threads);
  options.fast = !checked;
  char* text = nullptr;
  emu_pipeline* made = emu_pipeline_create(function->library->compiled, &options, &text);
  message = taken(text);
  return made;
}

struct LibraryMethods : Library {
  Array* names() const {
    std::vector<Ref<Object>> out;
    for (size_t i = 0; i < emu_library_function_count(compiled); ++i)
      out.push_back(Ref<Object>::adopt(String::with(emu_library_function_name(compiled, i))));
    return autoreleased(Array::with(std::move(out)));
  }
  Function* find(const std::string& name, Error** out) {
    if (emu_library_find_function(compiled, name.c_str()) < 0 || take_fault(METAL_FAULT_FUNCTION)) {
      set_error(out, kLibraryDomain, MTL::LibraryErrorFunctionNotFound, "no function \"" + name + "\" in the library");
      return nullptr;
    }
    auto* made = make<Function>();
    made->library.set(this);
    made->name = made->plain_name = name;
    return made;
  }
  // Metal specialises here, so a missing or mistyped constant fails here and not at the pipeline.
  Function* specialise(const std::string& name, const std::string& specialized, ConstantValues* values, Error** out) {
    Function* made = find(name, out);
    if (!made) return nullptr;
    if (!specialized.empty()) made->name = specialized;
    if (!values) return made;
    made->constants = values->values;
    made->specialised = true;
    made->compiled_checked = option(METAL_OPTION_CHECKED);
    made->compiled_width = option(METAL_OPTION_SIMD_WIDTH);
    std::string message;
    made->compiled = compile(made, 0, made->compiled_checked, message);
    if (made->compiled) return made;
    release(made);
    set_error(out, kLibraryDomain, MTL::LibraryErrorCompileFailure, message);
    return nullptr;
  }
  Function* function(String* name) {
    if (!name) {
      report("null-argument", "newFunctionWithName: was given nil", this);
      return nullptr;
    }
    return find(str(name), nullptr);
  }
  Function* function_constants(String* name, ConstantValues* values, Error** out) {
    if (!values) {
      report("null-argument", "newFunctionWithName:constantValues:error: was given no constant values", this);
      return nullptr;
    }
    return specialise(str(name), "", values, out);
  }
  Function* function_described(FunctionDescriptor* descriptor, Error** out) {
    return specialise(str(descriptor->name.get()), str(descriptor->specialized_name.get()), descriptor->constants.get(), out);
  }
  struct Job {
    Ref<Library> library;
    std::string name, specialized;
    Ref<ConstantValues> values;
    void (^handler)(Function*, Error*);
  };
  void later(std::string name, std::string specialized, ConstantValues* values, void (^handler)(Function*, Error*)) {
    auto* job = new Job{Ref<Library>(this), std::move(name), std::move(specialized), Ref<ConstantValues>(values),
                        copied(handler)};
    on_new_thread(
        [](void* at) {
          auto* job = static_cast<Job*>(at);
          Error* error = nullptr;
          auto* library = static_cast<LibraryMethods*>(job->library.get());
          Function* made = library->specialise(job->name, job->specialized, job->values.get(), &error);
          job->handler(made, error);
          _Block_release(job->handler);
          if (made) release(made);
          delete job;
        },
        job);
  }
  void function_later(String* name, ConstantValues* values, void (^handler)(Function*, Error*)) {
    later(str(name), "", values, handler);
  }
  void described_later(FunctionDescriptor* descriptor, void (^handler)(Function*, Error*)) {
    later(str(descriptor->name.get()), str(descriptor->specialized_name.get()), descriptor->constants.get(), handler);
  }
  int64_t type() const { return MTL::LibraryTypeExecutable; }
  String* install_name() const { return nullptr; }
};

struct FunctionMethods : Function {
  String* get_name() const { return temporary(name); }
  uint64_t type() const { return MTL::FunctionTypeKernel; }
  uint64_t get_options() const { return 0; }
  Dictionary* constants_dictionary() const {
    auto* out = make<Dictionary>();
    emu_library* compiled_library = library->compiled;
    for (size_t i = 0; i < emu_library_constant_count(compiled_library); ++i) {
      emu_function_constant known;
      if (emu_library_constant(compiled_library, i, &known)) continue;
      auto* constant = make<FunctionConstant>();
      constant->name = Ref<String>::adopt(String::with(known.name));
      constant->index = known.index;
      constant->type = known.type;
      constant->required = known.required;
      out->items.emplace_back(Ref<Object>(constant->name.get()), Ref<Object>::adopt(constant));
    }
    return autoreleased(out);
  }
};

struct ConstantMethods : FunctionConstant {
  String* get_name() const { return name.get(); }
  uint64_t get_index() const { return index; }
  uint64_t get_type() const { return type; }
  bool get_required() const { return required; }
};

struct PipelineDescriptorMethods : PipelineDescriptor {
  Function* get_function() const { return function.get(); }
  Array* get_archives() const { return archives.get(); }
  void set_archives(Array* value) { archives.set(value); }
  void set_function(Function* value) { function.set(value); }
  bool get_multiple() const { return multiple_of_width; }
  void set_multiple(bool value) { multiple_of_width = value; }
  uint64_t get_max() const { return max_threads; }
  void set_max(uint64_t value) { max_threads = value; }
  MTL::Size get_required() const { return required; }
  void set_required(MTL::Size value) { required = value; }
  bool get_indirect() const { return indirect; }
  void set_indirect(bool value) { indirect = value; }
  int64_t get_validation() const { return shader_validation; }
  void set_validation(int64_t value) { shader_validation = value; }
  void clear() {
    function.reset();
    archives.reset();
    label.reset();
    multiple_of_width = indirect = false;
    max_threads = 0;
    required = MTL::Size(0, 0, 0);
  }
  Object* copy() const {
    auto* made = make<PipelineDescriptor>();
    made->label = label;
    made->function = function;
    made->archives = archives;
    made->multiple_of_width = multiple_of_width;
    made->max_threads = max_threads;
    made->required = required;
    made->indirect = indirect;
    return made;
  }
};

struct PipelineMethods : Pipeline {
  uint64_t get_max() const { return max_threads; }
  uint64_t get_width() const { return width; }
  uint64_t static_memory() const { return info.static_threadgroup_memory_length; }
  bool get_indirect() const { return indirect; }
  MTL::Size get_required() const { return required; }
  uint64_t allocated_size() const { return kPage; }
};

}  // namespace

Object* new_library(String* source, CompileOptions* options, Error** out) {
  if (!source) {
    report("null-argument", "newLibraryWithSource: was given nil");
    return nullptr;
  }
  if (cut_off_by_fork()) {
    set_error(out, kLibraryDomain, MTL::LibraryErrorInternal,
              "the shader compiler cannot be reached from a process forked after Metal was used");
    return nullptr;
  }
  if (take_fault(METAL_FAULT_COMPILE)) {
    set_error(out, kLibraryDomain, MTL::LibraryErrorCompileFailure,
              "program_source:1:1: error: compilation failed (injected by the emulated device)");
    return nullptr;
  }
  const uint64_t version = options && options->language_version ? options->language_version : newest_language();
  if (version > newest_language()) {
    set_error(out, kLibraryDomain, MTL::LibraryErrorUnsupported,
              "language version " + version_text(version) + " is not supported on this OS (up to " + version_text(newest_language()) + ")");
    return nullptr;
  }
  std::vector<std::pair<std::string, std::string>> texts;
  if (options && options->macros)
    for (const auto& [key, value] : options->macros->items) texts.emplace_back(describe(key.get()), describe(value.get()));
  std::vector<emu_macro> macros;
  for (const auto& [name, value] : texts) macros.push_back({name.c_str(), value.c_str()});
  emu_compile_options settings{};
  settings.size = sizeof settings;
  settings.language_version = static_cast<uint32_t>(version);
  settings.fast_math = options && !options->fast_math ? -1 : 1;
  settings.macros = macros.data();
  settings.macro_count = macros.size();
  char* text = nullptr;
  emu_library* compiled = emu_library_create(str(source).c_str(), &settings, &text);
  const std::string message = taken(text);
  if (!compiled) {
    set_error(out, kLibraryDomain, MTL::LibraryErrorCompileFailure, message);
    return nullptr;
  }
  // as Metal: a library and an error that holds the warnings
  if (!message.empty()) set_error(out, kLibraryDomain, MTL::LibraryErrorCompileWarning, message);
  auto* made = make<Library>();
  made->compiled = compiled;
  std::string all = str(source) + "\n" + version_text(version) + (settings.fast_math > 0 ? " fast" : "");
  for (const auto& [name, value] : texts) all += " " + name + "=" + value;
  made->fingerprint = std::to_string(std::hash<std::string>()(all));
  count(Total::kLibraries);
  return made;
}

Object* new_pipeline(Function* function, PipelineDescriptor* descriptor, Error** out) {
  if (!function) {
    report("null-argument", "newComputePipelineState was given no function");
    return nullptr;
  }
  if (cut_off_by_fork()) {
    set_error(out, kPipelineDomain, 1, "the shader compiler cannot be reached from a process forked after Metal was used");
    return nullptr;
  }
  if (take_fault(METAL_FAULT_PIPELINE)) {
    set_error(out, kPipelineDomain, 3, "Compiler encountered an internal error (injected by the emulated device)");
    return nullptr;
  }
  const uint64_t wanted = descriptor ? descriptor->max_threads : 0;
  if (wanted > 1024) {
    report("max-threads", "maxTotalThreadsPerThreadgroup " + std::to_string(wanted) + " of the descriptor is above 1024", descriptor);
    return nullptr;
  }
  emu_pipeline* compiled = nullptr;
  if (function->compiled && wanted == 0 && function->compiled_width == option(METAL_OPTION_SIMD_WIDTH) &&
      function->compiled_checked == option(METAL_OPTION_CHECKED)) {
    compiled = emu_pipeline_retain(function->compiled);
  } else {
    std::string message;
    compiled = compile(function, wanted, option(METAL_OPTION_CHECKED), message);
    if (!compiled) {
      set_error(out, kPipelineDomain, 3, message);
      return nullptr;
    }
  }
  const uint32_t uses = emu_pipeline_uses(compiled);
  if (uses && option(METAL_OPTION_GPU_FAMILY) < MTL::GPUFamilyApple7) {
    // as reported of a GPU of family 5 (whisper.cpp issue 1387)
    set_error(out, kPipelineDomain, 3, std::string("Encountered unlowered function call to air.simd") +
                                           (uses & EMU_USES_MATRICES ? "group_matrix_8x8" : ""));
    emu_pipeline_release(compiled);
    return nullptr;
  }
  auto* made = make<Pipeline>();
  made->compiled = compiled;
  made->function_name = function->name;
  emu_pipeline_get_info(compiled, &made->info);
  for (size_t i = 0; i < made->info.argument_count; ++i) {
    Argument argument{};
    if (emu_pipeline_argument(compiled, i, &argument.what)) continue;
    argument.name = argument.what.name ? argument.what.name : "";
    made->arguments.push_back(argument);
  }
  made->width = made->info.thread_execution_width;
  made->max_threads = std::min<uint64_t>(made->info.max_total_threads_per_threadgroup,
                                         static_cast<uint64_t>(option(METAL_OPTION_MAX_THREADS)));
  if (uses & EMU_USES_MATRICES)
    made->max_threads = std::min(made->max_threads, static_cast<uint64_t>(option(METAL_OPTION_MATRIX_THREADS)));
  if (descriptor) {
    made->label = descriptor->label;
    made->multiple_of_width = descriptor->multiple_of_width;
    made->indirect = descriptor->indirect;
    made->required = descriptor->required;
  }
  if (made->info.static_threadgroup_memory_length > kMaxThreadgroupMemory) {
    set_error(out, kPipelineDomain, 3,
              "Threadgroup memory size (" + std::to_string(made->info.static_threadgroup_memory_length) +
                  ") exceeds the maximum threadgroup memory allowed (32768)");
    release(made);
    return nullptr;
  }
  return made;
}

void define_metal_library() {
  Class* root = Root::cls();
  using O = OptionsMethods;
  define<CompileOptions>(root,
                         {m<&O::get_fast>("fastMathEnabled"),
                          m<&O::set_fast>("setFastMathEnabled:"),
                          m<&O::get_mode>("mathMode", os_version(15)),
                          m<&O::set_mode>("setMathMode:", os_version(15)),
                          m<&O::get_functions>("mathFloatingPointFunctions", os_version(15)),
                          m<&O::set_functions>("setMathFloatingPointFunctions:", os_version(15)),
                          m<&O::get_version>("languageVersion"),
                          m<&O::set_version>("setLanguageVersion:"),
                          m<&O::get_macros>("preprocessorMacros"),
                          m<&O::set_macros>("setPreprocessorMacros:"),
                          m<&O::get_invariance>("preserveInvariance"),
                          m<&O::set_invariance>("setPreserveInvariance:"),
                          m<&O::get_type>("libraryType"),
                          m<&O::set_type>("setLibraryType:"),
                          m<&O::get_optimisation>("optimizationLevel", os_version(13)),
                          m<&O::set_optimisation>("setOptimizationLevel:", os_version(13)),
                          m<&O::get_max_threads>("maxTotalThreadsPerThreadgroup", os_version(13, 3)),
                          m<&O::set_max_threads>("setMaxTotalThreadsPerThreadgroup:", os_version(13, 3)),
                          m<&O::get_install_name>("installName"),
                          m<&O::set_install_name>("setInstallName:"),
                          m<&O::copy>("copy")},
                         {}, true);
  using V = ValuesMethods;
  define<ConstantValues>(root,
                         {m<&V::set_index>("setConstantValue:type:atIndex:"),
                          m<&V::set_name>("setConstantValue:type:withName:"),
                          m<&V::set_range>("setConstantValues:type:withRange:"),
                          m<&V::clear>("reset"),
                          m<&V::copy>("copy")},
                         {}, true);
  using F = DescriptorMethods;
  define<FunctionDescriptor>(root,
                             {m<&F::get_name>("name"),
                              m<&F::set_name>("setName:"),
                              m<&F::get_specialized>("specializedName"),
                              m<&F::set_specialized>("setSpecializedName:"),
                              m<&F::get_constants>("constantValues"),
                              m<&F::set_constants>("setConstantValues:"),
                              m<&F::get_options>("options"),
                              m<&F::set_options>("setOptions:"),
                              m<&F::copy>("copy")},
                             {m<&F::made>("functionDescriptor")}, true);
  using L = LibraryMethods;
  define<Library>(Labelled::cls(),
                  {m<&L::names>("functionNames"),
                   m<&L::function>("newFunctionWithName:"),
                   m<&L::function_constants>("newFunctionWithName:constantValues:error:"),
                   m<&L::function_later>("newFunctionWithName:constantValues:completionHandler:"),
                   m<&L::function_described>("newFunctionWithDescriptor:error:"),
                   m<&L::described_later>("newFunctionWithDescriptor:completionHandler:"),
                   m<&L::type>("type"),
                   m<&L::install_name>("installName")});
  using N = FunctionMethods;
  define<Function>(Labelled::cls(),
                   {m<&N::get_name>("name"),
                    m<&N::type>("functionType"),
                    m<&N::get_options>("options"),
                    m<&N::constants_dictionary>("functionConstantsDictionary")});
  using C = ConstantMethods;
  define<FunctionConstant>(root,
                           {m<&C::get_name>("name"),
                            m<&C::get_index>("index"),
                            m<&C::get_type>("type"),
                            m<&C::get_required>("required")});
  using D = PipelineDescriptorMethods;
  define<PipelineDescriptor>(Labelled::cls(),
                             {m<&D::get_function>("computeFunction"),
                              m<&D::set_function>("setComputeFunction:"),
                              m<&D::get_archives>("binaryArchives"),
                              m<&D::set_archives>("setBinaryArchives:"),
                              m<&D::get_multiple>("threadGroupSizeIsMultipleOfThreadExecutionWidth"),
                              m<&D::set_multiple>("setThreadGroupSizeIsMultipleOfThreadExecutionWidth:"),
                              m<&D::get_max>("maxTotalThreadsPerThreadgroup"),
                              m<&D::set_max>("setMaxTotalThreadsPerThreadgroup:"),
                              m<&D::get_required>("requiredThreadsPerThreadgroup", os_version(26)),
                              m<&D::set_required>("setRequiredThreadsPerThreadgroup:", os_version(26)),
                              m<&D::get_indirect>("supportIndirectCommandBuffers"),
                              m<&D::set_indirect>("setSupportIndirectCommandBuffers:"),
                              m<&D::get_validation>("shaderValidation", os_version(15)),
                              m<&D::set_validation>("setShaderValidation:", os_version(15)),
                              m<&D::clear>("reset"),
                              m<&D::copy>("copy")},
                             {}, true);
  using P = PipelineMethods;
  define<Pipeline>(Labelled::cls(),
                   {m<&P::get_max>("maxTotalThreadsPerThreadgroup"),
                    m<&P::get_width>("threadExecutionWidth"),
                    m<&P::static_memory>("staticThreadgroupMemoryLength"),
                    m<&P::get_indirect>("supportIndirectCommandBuffers"),
                    m<&P::get_required>("requiredThreadsPerThreadgroup", os_version(26)),
                    m<&P::allocated_size>("allocatedSize", os_version(15))});
}

}  // namespace device
