#include "compile.h"

#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <spawn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <stdexcept>

extern char **environ;

namespace emu {
namespace {

std::mutex &settings_mutex = *new std::mutex;  // never destroyed: a thread may compile while the process exits
Settings &settings = *new Settings;

// 128 bits of FNV-1a-like mixing: enough to name cache entries, not meant to resist an attacker.
struct Hash {
  uint64_t a = 0xcbf29ce484222325ull, b = 0x9ae16a3b2f90404full;
  void add(const std::string &s) {
    for (unsigned char c : s) a = (a ^ c) * 0x100000001b3ull, b = (b + c) * 0xc6a4a7935bd1e995ull, b ^= b >> 29;
    a ^= s.size() * 0x9e3779b97f4a7c15ull, b += a;
  }
  std::string text() const {
    char buffer[33];
    snprintf(buffer, sizeof buffer, "%016lx%016lx", (unsigned long)a, (unsigned long)b);
    return buffer;
  }
};

bool read_whole(const std::string &path, std::string *out) {
  FILE *f = fopen(path.c_str(), "rb");
  if (!f) return false;
  out->clear();
  char buffer[65536];
  for (size_t n; (n = fread(buffer, 1, sizeof buffer, f)) > 0;) out->append(buffer, n);
  fclose(f);
  return true;
}

void write_whole(const std::string &path, const std::string &text) {
  FILE *f = fopen(path.c_str(), "wb");
  if (!f) throw std::runtime_error("cannot write " + path + ": " + strerror(errno));
  bool ok = fwrite(text.data(), 1, text.size(), f) == text.size();
  ok = fclose(f) == 0 && ok;
  if (!ok) throw std::runtime_error("cannot write " + path);
}

void make_folders(const std::string &path) {
  for (size_t i = 1; i <= path.size(); i++)
    if (i == path.size() || path[i] == '/') mkdir(path.substr(0, i).c_str(), 0777);
}

std::string variable(const char *name) {
  const char *v = getenv(name);
  return v ? v : "";
}

Settings current_settings() {
  std::lock_guard<std::mutex> lock(settings_mutex);
  Settings &s = settings;
  if (s.zig.empty()) s.zig = variable("EMU_ZIG");
  if (s.zig.empty()) s.zig = "zig";
  if (s.include_dir.empty()) s.include_dir = variable("EMU_INCLUDE_DIR");
  if (s.include_dir.empty()) {
    Dl_info info;
    if (dladdr((void *)&current_settings, &info) && info.dli_fname) {
      std::string path = info.dli_fname;
      s.include_dir = path.substr(0, path.rfind('/') + 1) + "../include";
    }
  }
  if (s.cache_dir.empty()) s.cache_dir = variable("EMU_CACHE_DIR");
  if (s.cache_dir.empty()) {
    std::string base = variable("XDG_CACHE_HOME");
    s.cache_dir = (base.empty() ? variable("HOME") + "/.cache" : base) + "/metal-emulator";
  }
  return s;
}

std::string unique_path(const std::string &suffix) {
  static std::atomic<uint64_t> counter{0};
  static const uint64_t salt = (uint64_t)&counter;
  std::string folder = current_settings().cache_dir + "/tmp";
  make_folders(folder);
  return folder + "/" + std::to_string(getpid()) + "-" + std::to_string(salt % 99991) + "-" + std::to_string(counter++) + suffix;
}

struct Removed {  // a temporary file, gone when its scope ends
  std::string path;
  explicit Removed(const std::string &p) : path(p) {}
  ~Removed() { unlink(path.c_str()); }
};

int run(const std::vector<std::string> &arguments, std::string *messages, const std::string &output = "/dev/null") {
  Removed log(unique_path(".log"));
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_addopen(&actions, 1, output.c_str(), O_WRONLY | O_CREAT, 0666);
  posix_spawn_file_actions_addopen(&actions, 2, log.path.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0666);
  std::vector<char *> argv;
  for (const std::string &a : arguments) argv.push_back(const_cast<char *>(a.c_str()));
  argv.push_back(nullptr);
  pid_t pid;
  int e = posix_spawnp(&pid, argv[0], &actions, nullptr, argv.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  if (e) throw std::runtime_error("cannot run '" + arguments[0] + "': " + strerror(e) + "; set EMU_ZIG to the zig program (PyPI package ziglang)");
  int status;
  while (waitpid(pid, &status, 0) < 0)
    if (errno != EINTR) throw std::runtime_error(std::string("waiting for the compiler: ") + strerror(errno));
  read_whole(log.path, messages);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128;
}

std::vector<std::string> clang_base(const Settings &s) {
  std::vector<std::string> a = {s.zig, "clang"};
  for (const char *f : {"-x", "c++", "-std=c++17",
#if defined(__x86_64__)
                        "--target=x86_64-linux-gnu", "-march=x86-64-v3",
#else
                        "--target=aarch64-linux-gnu", "-march=armv8.2-a+fp16",
#endif
                        "-nostdinc", "-nostdinc++", "-fno-color-diagnostics"})
    a.push_back(f);
  return a;
}

std::vector<std::string> language_flags(const Settings &s, int variant, bool fast_math) {
  std::vector<std::string> a = clang_base(s);
  for (const char *f : {"-O2", "-fPIC", "-gline-tables-only", "-fdeclspec", "-fno-exceptions", "-fno-rtti", "-fno-strict-aliasing",
                        "-fno-threadsafe-statics", "-fno-math-errno", "-fno-optimize-sibling-calls", "-fno-vectorize", "-fno-slp-vectorize", "-fno-unroll-loops", "-fno-finite-loops", "-fno-stack-protector", "-fno-asynchronous-unwind-tables",
                        "-fno-omit-frame-pointer", "-fwrapv", "-ftemplate-depth=2048", "-fconstexpr-steps=10000000", "-Xclang", "-fsycl-is-device",
                        "-Xclang", "-ffloat16-excess-precision=none", "-mllvm", "-tail-dup-placement=0", "-mllvm", "-disable-tail-duplicate",
                        "-mllvm", "-disable-early-taildup", "-mllvm", "-inline-threshold=2000",
                        "-Wno-everything", "-Wuninitialized", "-Wsometimes-uninitialized"})
    a.push_back(f);
  a.push_back(fast_math ? "-ffp-contract=fast" : "-ffp-contract=on");
  if (variant != kFast)
    for (const char *f : {"-DEMU_CHECKED", "-fsanitize=array-bounds", "-fsanitize-recover=array-bounds", "-Xclang", "-fsanitize=kernel-address",
                          "-mllvm", "-asan-instrumentation-with-call-threshold=0", "-mllvm", "-asan-opt=0", "-mllvm", "-asan-stack=1", "-mllvm", "-asan-mapping-offset=17592186044416",
                          "-mllvm", "-asan-max-inline-poisoning-size=0", "-mllvm", "-asan-use-after-return=never",
                          "-mllvm", "-asan-instrument-dynamic-allocas=0", "-mllvm", "-asan-globals=0", "-mllvm", "-asan-kernel=1", "-mllvm", "-asan-kernel-mem-intrinsic-prefix=1",
                          "-mllvm", "-asan-use-stack-safety=1"})
      a.push_back(f);
  if (variant != kFast) a.push_back(variant == kCheckedZeros ? "-ftrivial-auto-var-init=zero" : "-ftrivial-auto-var-init=pattern");
  return a;
}

// Names the shim, this compiler's own sources and clang, so that a change in any of them makes new cache entries.
std::string shim_identity(const Settings &s) {
  static std::mutex &mutex = *new std::mutex;  // never destroyed: a thread may compile while the process exits
  static std::map<std::string, std::string> &known = *new std::map<std::string, std::string>;
  std::lock_guard<std::mutex> lock(mutex);
  std::string key = s.include_dir + "|" + s.zig;
  auto it = known.find(key);
  if (it != known.end()) return it->second;
  Hash h;
#ifdef EMU_COMPILER_ID
  h.add(EMU_COMPILER_ID);
#endif
  h.add(s.zig);
  struct stat st;
  if (stat(s.zig.c_str(), &st) == 0) h.add(std::to_string(st.st_size) + "," + std::to_string(st.st_mtime));
  h.add(s.include_dir);
  DIR *d = opendir((s.include_dir + "/emulator").c_str());
  if (!d) throw std::runtime_error("no shim headers in '" + s.include_dir + "'; set EMU_INCLUDE_DIR to tests/emulator/include");
  std::vector<std::string> names;
  while (dirent *e = readdir(d)) names.push_back(e->d_name);
  closedir(d);
  std::sort(names.begin(), names.end());
  for (const std::string &n : names) {
    std::string text;
    if (n[0] == '.' || !read_whole(s.include_dir + "/emulator/" + n, &text)) continue;
    h.add(n), h.add(text);
  }
  return known[key] = h.text();
}

// Held by one process at a time; freed with the descriptor, also where a process is killed.
struct FileLock {
  int file;
  explicit FileLock(const std::string &path) : file(open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666)) {
    while (file >= 0 && flock(file, LOCK_EX) != 0 && errno == EINTR) {
    }
  }
  ~FileLock() {
    if (file >= 0) close(file);
  }
  FileLock(const FileLock &) = delete;
};

// The shim's headers are compiled once per variant; without that each kernel would pay for them again.
std::string precompiled_shim(const Settings &s, int variant, bool fast_math) {
  static std::mutex &mutex = *new std::mutex;
  std::lock_guard<std::mutex> lock(mutex);
  Hash h;
  h.add(shim_identity(s));
  h.add(s.include_dir);  // the precompiled form names the files it came from
  std::vector<std::string> a = language_flags(s, variant, fast_math);
  for (const std::string &f : a) h.add(f);
  std::string folder = s.cache_dir + "/shim", path = folder + "/" + h.text() + ".pch";
  if (access(path.c_str(), R_OK) == 0) return path;
  make_folders(folder);
  FileLock only(path + ".lock");
  if (access(path.c_str(), R_OK) == 0) return path;  // another process was faster
  std::string temporary = unique_path(".pch"), messages;
  for (size_t i = 0; i < a.size(); i++)
    if (a[i] == "c++") a[i] = "c++-header";
  // their content is in the key: a checkout that only renewed their times still fits
  a.insert(a.end(), {"-Xclang", "-fno-pch-timestamp", "-I", s.include_dir, s.include_dir + "/emulator/entry.h", "-o", temporary});
  if (run(a, &messages) != 0) throw std::runtime_error("the emulator's shim headers do not compile:\n" + messages);
  if (rename(temporary.c_str(), path.c_str()) != 0) throw std::runtime_error("cannot move into the cache: " + path);
  return path;
}

void replace_all(std::string *s, const std::string &from, const std::string &to) {
  for (size_t p = 0; (p = s->find(from, p)) != std::string::npos; p += to.size()) s->replace(p, from.size(), to);
}

// Clang speaks of the shim; the user should read MSL.
std::string user_messages(std::string m, const std::string &path, const std::string &file_name, const std::string &include_dir) {
  replace_all(&m, path, file_name);
  replace_all(&m, "const __global_host ", "constant ");
  replace_all(&m, "__global_host ", "constant ");
  replace_all(&m, "__global ", "device ");
  replace_all(&m, "__local ", "threadgroup ");
  replace_all(&m, "_Float16", "half");
  std::string out;
  bool advised = false;
  for (size_t b = 0; b < m.size();) {
    size_t e = m.find('\n', b);
    if (e == std::string::npos) e = m.size();
    std::string line = m.substr(b, e - b);
    b = e + 1;
    out += line + "\n";
    bool undeclared = line.find("error: use of undeclared identifier") != std::string::npos || line.find("error: no member named") != std::string::npos ||
                      line.find("error: no template named") != std::string::npos || line.find("error: unknown type name") != std::string::npos;
    if (undeclared && !advised) {
      advised = true;
      size_t q = line.find('\''), r = line.find('\'', q + 1);
      std::string name = q != std::string::npos && r != std::string::npos ? line.substr(q + 1, r - q - 1) : "it";
      out += "note: if '" + name + "' is part of the Metal Shading Language, it is not in the emulator: add it to " + include_dir +
             "/emulator/ (math.h for functions of one thread, threads.h for those of several, types.h for types)\n";
    }
  }
  return out;
}

std::string messages_of(const std::vector<Message> &errors) {
  std::string s;
  for (const Message &m : errors) s += m.file + ":" + std::to_string(m.line) + ": error: " + m.text + "\n";
  return s;
}

std::string escape(const std::string &s) {
  std::string r;
  for (char c : s) {
    if (c == '"' || c == '\\') r += '\\';
    r += c;
  }
  return r;
}

void store(const std::string &path, const std::string &text) {
  std::string temporary = unique_path(".new");
  write_whole(temporary, text);
  if (rename(temporary.c_str(), path.c_str()) != 0) throw std::runtime_error("cannot move into the cache: " + path);
}

std::string source_key(const Settings &s, const Source &source) {
  Hash h;
  h.add(shim_identity(s));
  h.add(source.text), h.add(source.file_name), h.add(std::to_string(source.language_version));
  for (const Macro &m : source.macros) h.add(m.name), h.add(m.value);
  for (const std::string &p : source.include_paths) h.add(p);
  return h.text();
}

std::string preprocess(const Settings &s, const Source &source, const std::string &key, bool cacheable) {
  std::string folder = s.cache_dir + "/check", path = folder + "/" + key + ".pp", text;
  if (cacheable && read_whole(path, &text)) return text;
  make_folders(folder);
  Removed in(unique_path(".metal")), out(unique_path(".pp"));
  write_whole(in.path, "#line 1 \"" + escape(source.file_name) + "\"\n" + source.text + "\n");
  std::vector<std::string> a = clang_base(s);
  unsigned major = source.language_version >> 16, minor = source.language_version & 0xffff;
  a.insert(a.end(), {"-E", "-Wno-everything", "-U__linux__", "-U__linux", "-Ulinux", "-U__unix__", "-U__x86_64__", "-U__gnu_linux__",
                     "-D__METAL_VERSION__=" + std::to_string(major * 100 + minor * 10), "-D__METAL_MACOS__=1"});
  if (source.language_version >= 0x30001) a.push_back("-D__HAVE_BFLOAT__=1");
  for (const Macro &m : source.macros) a.push_back("-D" + m.name + "=" + m.value);
  a.insert(a.end(), {"-imacros", s.include_dir + "/emulator/macros.h", "-I", s.include_dir});
  for (const std::string &p : source.include_paths) a.insert(a.end(), {"-I", p});
  a.insert(a.end(), {in.path, "-o", out.path});
  std::string messages;
  if (run(a, &messages) != 0) throw std::runtime_error(user_messages(messages, in.path, source.file_name, s.include_dir));
  if (!read_whole(out.path, &text)) throw std::runtime_error("the preprocessor wrote nothing");
  // The markers name the temporary file for its first lines and for the command line; the user knows none of them.
  replace_all(&text, in.path, source.file_name);
  if (cacheable) store(path, text);
  return text;
}

}  // namespace

void configure(const char *zig, const char *include_dir, const char *cache_dir) {
  std::lock_guard<std::mutex> lock(settings_mutex);
  if (zig) settings.zig = zig;
  if (include_dir) settings.include_dir = include_dir;
  if (cache_dir) settings.cache_dir = cache_dir;
}

Checked check_source(const Source &source, std::string *warnings) {
  Settings s = current_settings();
  std::string key = source_key(s, source);
  bool cacheable = source.include_paths.empty();
  Checked c;
  c.preprocessed = preprocess(s, source, key, cacheable);
  RewriteOptions options;
  options.language_version = source.language_version;
  c.rewritten = rewrite(c.preprocessed, options);
  if (!c.rewritten.errors.empty()) throw std::runtime_error(messages_of(c.rewritten.errors));
  if (!cacheable) {
    Hash h;
    h.add(shim_identity(s)), h.add(c.preprocessed);
    key = h.text();
  }
  std::string path = s.cache_dir + "/check/" + key + ".ok";
  if (read_whole(path, warnings)) return c;
  Removed in(unique_path(".cpp"));
  write_whole(in.path, c.rewritten.text);
  std::vector<std::string> a = language_flags(s, kFast, source.fast_math);
  std::string pch = precompiled_shim(s, kFast, source.fast_math);
  a.insert(a.end(), {"-include-pch", pch, "-fsyntax-only", in.path});
  std::string messages;
  int status = run(a, &messages);
  messages = user_messages(messages, in.path, source.file_name, s.include_dir);
  if (status != 0) throw std::runtime_error(messages);
  make_folders(s.cache_dir + "/check");
  store(path, messages);
  *warnings = messages;
  return c;
}

namespace {

struct Node {
  size_t depth;
  std::string text;
};

// "<file:12:3, col:9>", "<line:12:3, …>", "<col:3, …>": only what changed is printed.
void track_place(const std::string &text, std::string *file, int *line) {
  size_t b = text.find('<');
  if (b == std::string::npos) return;
  size_t e = text.find('>', b);
  // Both ends of the range move the printer's state, so both are read, and the beginning is kept for this node.
  std::string range = text.substr(b + 1, e == std::string::npos ? std::string::npos : e - b - 1);
  size_t comma = range.find(", ");
  std::string ends[2] = {range.substr(0, comma), comma == std::string::npos ? "" : range.substr(comma + 2)};
  for (std::string &p : ends) {
    size_t colon = p.find(':');
    if (colon == std::string::npos) continue;
    std::string head = p.substr(0, colon);
    if (head == "col" || head == "<invalid sloc" || head == "<scratch space") continue;
    if (head != "line") *file = head;
    *line = atoi(p.c_str() + colon + 1);
  }
}

// Who calls whom, read from clang's printed tree. Metal has no recursion.
class Calls {
 public:
  // Notes a node; `path` holds the nodes around it.
  void see(const std::string &node, const std::vector<Node> &path, const std::string &file, int line) {
    if (is_function(node)) {
      uint64_t id = number(node, node.find("0x")), previous = number(node, node.find(" prev 0x"));
      Function &f = functions_[id];
      size_t type = node.find(" '");
      size_t name = type == std::string::npos ? type : node.rfind(' ', type - 1);
      if (name != std::string::npos) f.name = node.substr(name + 1, type - name - 1);
      if (previous) f.first = previous;
      f.is_constant = node.find(" constexpr") != std::string::npos;
      f.place = file + ":" + std::to_string(line);
      order_.push_back(id);
      return;
    }
    uint64_t callee = 0;
    if (starts(node, "DeclRefExpr")) {
      size_t at = node.find(" Function 0x");
      callee = number(node, at != std::string::npos ? at : node.find(" CXXMethod 0x"));
    } else if (starts(node, "MemberExpr")) {
      callee = number(node, node.rfind(" 0x"));
    }
    if (!callee) return;
    for (size_t i = path.size(); i-- > 0;)
      if (is_function(path[i].text)) {
        calls_.push_back({number(path[i].text, path[i].text.find("0x")), callee});
        return;
      }
  }
  // One message for each ring of functions. Functions that the compiler may evaluate are left alone.
  std::string rings() const {
    std::map<uint64_t, std::vector<uint64_t>> edges;
    for (const auto &c : calls_)
      if (functions_.count(c.second) && !constant(first(c.second))) edges[first(c.first)].push_back(first(c.second));
    std::map<uint64_t, bool> said;
    std::string out;
    for (uint64_t id : order_) {
      uint64_t start = first(id);
      if (said[start] || constant(start)) continue;
      std::map<uint64_t, uint64_t> from;  // whence each function was reached
      std::vector<uint64_t> next = {start};
      for (size_t i = 0; i < next.size() && !from.count(start); i++)
        for (uint64_t to : edges[next[i]])
          if (from.emplace(to, next[i]).second) next.push_back(to);
      if (!from.count(start)) continue;
      std::string through;
      said[start] = true;
      for (uint64_t at = from[start]; at != start; at = from[at]) said[at] = true, through = (through.empty() ? "'" : through + ", '") + functions_.at(at).name + "'";
      const Function &f = functions_.at(start);
      out += f.place + ": error: '" + f.name + "' calls itself" + (through.empty() ? "" : " through " + through) + "; Metal has no recursion\n";
    }
    return out;
  }

 private:
  struct Function {
    std::string name, place;
    uint64_t first = 0;  // the declaration before this one
    bool is_constant = false;
  };
  std::map<uint64_t, Function> functions_;
  std::vector<uint64_t> order_;
  std::vector<std::pair<uint64_t, uint64_t>> calls_;

  static bool starts(const std::string &s, const char *with) { return s.compare(0, strlen(with), with) == 0; }
  static bool is_function(const std::string &node) { return starts(node, "FunctionDecl 0x") || starts(node, "CXXMethodDecl 0x") || starts(node, "CXXConversionDecl 0x"); }
  static uint64_t number(const std::string &s, size_t at) {
    if (at == std::string::npos) return 0;
    at = s.find("0x", at);
    return at == std::string::npos ? 0 : strtoull(s.c_str() + at, nullptr, 16);
  }
  uint64_t first(uint64_t id) const {
    for (auto f = functions_.find(id); f != functions_.end() && f->second.first; f = functions_.find(id)) id = f->second.first;
    return id;
  }
  bool constant(uint64_t id) const {
    auto f = functions_.find(id);
    return f != functions_.end() && f->second.is_constant;
  }
};

}  // namespace

std::string strict_check(const Source &source) {
  std::string warnings;
  Checked c = check_source(source, &warnings);
  Settings s = current_settings();
  RewriteOptions options;
  options.language_version = source.language_version;
  options.wrap = true;
  Rewritten r = rewrite(c.preprocessed, options);
  Removed in(unique_path(".cpp")), out(unique_path(".ast"));
  write_whole(in.path, r.text);
  std::vector<std::string> a = language_flags(s, kFast, source.fast_math);
  a.insert(a.end(), {"-include-pch", precompiled_shim(s, kFast, source.fast_math), "-fsyntax-only", "-Xclang", "-ast-dump", "-Xclang", "-ast-dump-filter", "-Xclang", "emu_user", in.path});
  std::string messages, dump;
  if (run(a, &messages, out.path) != 0) throw std::runtime_error(user_messages(messages, in.path, source.file_name, s.include_dir));
  read_whole(out.path, &dump);
  std::vector<Node> path;
  std::string file = source.file_name, found;
  int line = 0;
  std::map<std::string, bool> said;
  Calls calls;
  for (size_t b = 0; b < dump.size();) {
    size_t e = dump.find('\n', b);
    if (e == std::string::npos) e = dump.size();
    std::string text = dump.substr(b, e - b);
    b = e + 1;
    size_t depth = text.find_first_not_of("|`- ");
    if (depth == std::string::npos) continue;
    while (!path.empty() && path.back().depth >= depth) path.pop_back();
    std::string node = text.substr(depth);
    track_place(node, &file, &line);
    if (node.find("<AddressSpaceConversion>") != std::string::npos) {
      std::string parent = path.empty() ? "" : path.back().text, grandparent = path.size() > 1 ? path[path.size() - 2].text : "";
      size_t q = node.find('\''), t = node.find('\'', q + 1);
      std::string type = q == std::string::npos ? "" : node.substr(q + 1, t - q - 1);
      bool pointer = !type.empty() && type.back() == '*', is_explicit = node.compare(0, 12, "ImplicitCast") != 0;
      bool literal = type.find("__global_host char *") != std::string::npos;
      bool binds = parent.compare(0, 8, "CallExpr") == 0 || parent.compare(0, 7, "VarDecl") == 0;
      if (!literal && (pointer || is_explicit || binds)) {
        std::string m = file + ":" + std::to_string(line) + ": error: " + (is_explicit ? "a cast" : "a conversion") + " to '" + type + "' changes the address space\n";
        m = user_messages(m, in.path, source.file_name, s.include_dir);
        if (!said[m]) found += m;
        said[m] = true;
      }
    }
    calls.see(node, path, file, line);
    path.push_back({depth, node});
  }
  return found + user_messages(calls.rings(), in.path, source.file_name, s.include_dir);
}

static std::string entry_text(const Kernel &k) {
  std::string s = "\n#pragma clang attribute push(__attribute__((no_sanitize(\"kernel-address\"))), apply_to = function)\n";
  s += "using emu_entry_signature = metal::emu_signature<decltype(&" + k.expression + ")>;\n";
  std::string forms, call;
  for (size_t i = 0; i < k.parameters.size(); i++) {
    const Parameter &p = k.parameters[i];
    std::string type = "emu_entry_signature::parameter<" + std::to_string(i) + ">", n = std::to_string(p.index);
    call += i ? ",\n    " : "\n    ";
    if (p.attribute == "buffer" || p.attribute == "threadgroup") {
      std::string memory = "metal::emu_memory<" + type + ">";
      std::string at = p.attribute == "buffer" ? "emu_f->buffers[" : "emu_f->shared[";
      call += memory + "::bind(" + at + n + "])";
      forms += "  emu_forms[" + std::to_string(i) + "] = " + memory + "::form;\n";
      if (!p.condition.empty()) forms += "  if (!(bool)(" + p.condition + ")) emu_forms[" + std::to_string(i) + "].size = 0;\n";
    } else {
      std::string attribute = p.attribute;
      for (char &c : attribute) c = (char)toupper(c);
      call += "metal::emu_attribute<" + type + ">(emu_f->attributes[EMU_" + attribute + "])";
    }
  }
  s += "extern \"C\" [[clang::sycl_external]] void emu_entry_describe(emu_argument_form *emu_forms) {\n" + forms + "}\n";
  s += "extern \"C\" [[clang::sycl_external]] void emu_entry(const emu_frame *emu_f) {\n  " + k.expression + "(" + call + ");\n}\n";
  return s + "#pragma clang attribute pop\n";
}

std::string compile_kernel(const Source &source, const std::string &preprocessed, int kernel,
                           const std::map<std::string, ConstantValue> &values, int variant, std::string *warnings) {
  Settings s = current_settings();
  RewriteOptions options;
  options.language_version = source.language_version;
  options.kernel = kernel;
  options.values = &values;
  Rewritten r = rewrite(preprocessed, options);
  if (!r.errors.empty()) throw std::runtime_error(messages_of(r.errors));
  r.text += entry_text(r.kernels[kernel]);
  std::vector<std::string> a = language_flags(s, variant, source.fast_math);
  Hash h;
  h.add(shim_identity(s)), h.add(r.text);
  for (const std::string &f : a) h.add(f);
  std::string folder = s.cache_dir + "/kernel", path = folder + "/" + h.text(), object;
  if (read_whole(path + ".o", &object) && read_whole(path + ".warnings", warnings)) return object;
  make_folders(folder);
  Removed in(unique_path(".cpp")), out(unique_path(".o"));
  write_whole(in.path, r.text);
  std::string pch = precompiled_shim(s, variant, source.fast_math);
  a.insert(a.end(), {"-include-pch", pch, "-c", in.path, "-o", out.path});
  std::string messages;
  int status = run(a, &messages);
  messages = user_messages(messages, in.path, source.file_name, s.include_dir);
  if (status != 0) throw std::runtime_error(messages);
  if (!read_whole(out.path, &object)) throw std::runtime_error("the compiler wrote nothing");
  store(path + ".warnings", messages);
  store(path + ".o", object);
  *warnings = messages;
  return object;
}

}  // namespace emu
