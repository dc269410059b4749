// Binary archives. The core keeps compiled code by content anyway, so a file only lists what an archive would hold: a function
// by all that specialises it, for one device and one macOS. What is not listed alike is not found, as on a Mac.
#include <cstdio>
#include <fstream>
#include <sstream>

#include "metal.h"

namespace device {

Object* new_pipeline(Function* function, PipelineDescriptor* descriptor, Error** out);  // metal_library.cc

namespace {

constexpr const char* kDomain = "MTLBinaryArchiveDomain";
constexpr const char* kFirstLine = "emulated MTLBinaryArchive";
constexpr const char* kLastLine = "end";

struct ArchiveDescriptorMethods : ArchiveDescriptor {
  Url* get_url() const { return url.get(); }
  void set_url(Url* value) { url.set(value); }
  ArchiveDescriptor* copy() const {
    auto* made = make<ArchiveDescriptor>();
    made->url = url;
    return made;
  }
};

std::string hexadecimal(const std::string& bytes) {
  std::string out;
  char text[3];
  for (unsigned char c : bytes) {
    std::snprintf(text, sizeof text, "%02x", c);
    out += text;
  }
  return out;
}

std::string entry_of(const PipelineDescriptor* descriptor) {
  const Function* function = descriptor->function.get();
  std::string out = device_name() + "/" + std::to_string(option(METAL_OPTION_GPU_FAMILY)) + " " +
                    std::to_string(option(METAL_OPTION_OS_VERSION)) + " " + function->library->fingerprint + " " +
                    function->plain_name + " " + std::to_string(descriptor->max_threads);
  for (const ConstantValue& value : function->constants)
    out += " " + (value.name.empty() ? std::to_string(value.index) : value.name) + ":" + std::to_string(value.type) + "=" +
           hexadecimal(value.data);
  return out;
}

bool read_entries(const std::string& path, std::vector<std::string>& entries) {
  std::ifstream file(path);
  std::string line;
  if (!std::getline(file, line) || line != kFirstLine) return false;
  while (std::getline(file, line)) {
    if (line == kLastLine) return true;
    entries.push_back(line);
  }
  return false;
}

struct ArchiveMethods : BinaryArchive {
  bool add(PipelineDescriptor* descriptor, Error** out) {
    if (!descriptor || !descriptor->function) {
      report("null-argument", "addComputePipelineFunctionsWithDescriptor:error: was given no function", this);
      return false;
    }
    if (take_fault(METAL_FAULT_ARCHIVE_ADD)) {
      set_error(out, kDomain, MTL::BinaryArchiveErrorCompilationFailure, "Compilation failed (injected by the emulated device)");
      return false;
    }
    // Apple's "Creating binary archives from device-built pipeline state objects": specialised functions from macOS 15 on
    if (!descriptor->function->constants.empty() && option(METAL_OPTION_OS_VERSION) < os_version(15)) {
      set_error(out, kDomain, MTL::BinaryArchiveErrorUnexpectedElement, "specialized functions are not supported on this OS");
      return false;
    }
    Object* made = new_pipeline(descriptor->function.get(), descriptor, out);
    if (!made) return false;
    release(made);
    count(Total::kCompilations);
    entries.push_back(entry_of(descriptor));
    return true;
  }
  bool serialize(Url* url, Error** out) const {
    if (!url) {
      report("null-argument", "serializeToURL:error: was given nil", this);
      return false;
    }
    std::ofstream file;
    if (!take_fault(METAL_FAULT_ARCHIVE_WRITE)) file.open(url->path, std::ios::trunc);
    file << kFirstLine << "\n";
    for (const std::string& entry : entries) file << entry << "\n";
    file << kLastLine << "\n";
    file.close();
    if (file) return true;
    set_error(out, kDomain, MTL::BinaryArchiveErrorInternalError, "cannot write to " + url->path);
    return false;
  }
};

}  // namespace

Object* new_archive(ArchiveDescriptor* descriptor, Error** out) {
  if (!descriptor) {
    report("null-argument", "newBinaryArchiveWithDescriptor:error: was given nil");
    return nullptr;
  }
  std::vector<std::string> entries;
  if (take_fault(METAL_FAULT_ARCHIVE)) {
    set_error(out, kDomain, MTL::BinaryArchiveErrorInternalError, "no archive (injected by the emulated device)");
    return nullptr;
  }
  if (descriptor->url && !read_entries(descriptor->url->path, entries)) {
    set_error(out, kDomain, MTL::BinaryArchiveErrorInvalidFile, "Invalid data: " + descriptor->url->path);
    return nullptr;
  }
  auto* made = make<BinaryArchive>();
  made->entries = std::move(entries);
  return made;
}

bool in_archives(const PipelineDescriptor* descriptor) {
  if (!descriptor->archives) return false;
  const std::string wanted = entry_of(descriptor);
  for (const auto& item : descriptor->archives->items)
    for (const std::string& entry : static_cast<const BinaryArchive*>(item.get())->entries)
      if (entry == wanted) return true;
  return false;
}

void define_metal_archive() {
  using D = ArchiveDescriptorMethods;
  define<ArchiveDescriptor>(Root::cls(), {m<&D::get_url>("url"), m<&D::set_url>("setUrl:"), m<&D::copy>("copy")}, {}, true);
  using A = ArchiveMethods;
  define<BinaryArchive>(Labelled::cls(), {m<&A::add>("addComputePipelineFunctionsWithDescriptor:error:"),
                                          m<&A::serialize>("serializeToURL:error:")});
}

}  // namespace device
