#include "image.h"

#include <dlfcn.h>
#include <elf.h>
#include <string.h>
#include <sys/mman.h>

#include <algorithm>
#include <stdexcept>

namespace emu {
namespace {

constexpr size_t kDynamicRoom = 128 << 10;  // the dynamic part, with gaps that catch overruns
constexpr size_t kGap = 64;                 // between threadgroup variables

void *find_symbol(const char *name) {
  static void *const self = [] {
    Dl_info info;
    return dladdr((void *)&find_symbol, &info) ? dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD) : nullptr;
  }();
  void *p = self ? dlsym(self, name) : nullptr;
  return p ? p : dlsym(RTLD_DEFAULT, name);
}

size_t align_up(size_t n, size_t a) { return (n + a - 1) & ~(a - 1); }

struct Reader {
  const unsigned char *p, *end;
  uint64_t bytes(int n) {
    uint64_t v = 0;
    if (p + n > end) return p = end, 0;
    memcpy(&v, p, n);
    p += n;
    return v;
  }
  uint64_t uleb() {
    uint64_t v = 0;
    for (int s = 0; p < end; s += 7) {
      unsigned char c = *p++;
      v |= (uint64_t)(c & 127) << s;
      if (!(c & 128)) break;
    }
    return v;
  }
  int64_t sleb() {
    int64_t v = 0;
    int s = 0;
    while (p < end) {
      unsigned char c = *p++;
      v |= (int64_t)(c & 127) << s;
      s += 7;
      if (!(c & 128)) {
        if (s < 64 && (c & 64)) v |= -(1ll << s);
        break;
      }
    }
    return v;
  }
  std::string string() {
    const unsigned char *b = p;
    while (p < end && *p) p++;
    std::string s((const char *)b, p - b);
    if (p < end) p++;
    return s;
  }
};

// DWARF 5, section 6.2: the line number program.
void read_lines(std::string section, const std::string &line_strings, const std::string &strings, uint64_t base, ObjectInfo *info) {
  Reader r{(const unsigned char *)section.data(), (const unsigned char *)section.data() + section.size()};
  while (r.p + 4 < r.end) {
    uint64_t length = r.bytes(4);
    const unsigned char *unit_end = std::min(r.p + length, r.end);
    int version = (int)r.bytes(2);
    if (version != 5) {
      r.p = unit_end;
      continue;
    }
    r.bytes(2);
    uint64_t header = r.bytes(4);
    const unsigned char *program = r.p + header;
    int min_length = (int)r.bytes(1);
    r.bytes(2);
    int line_base = (signed char)r.bytes(1), line_range = (int)r.bytes(1), opcode_base = (int)r.bytes(1);
    std::vector<int> lengths(opcode_base);
    for (int i = 1; i < opcode_base; i++) lengths[i] = (int)r.bytes(1);
    std::vector<std::string> names;
    for (int table = 0; table < 2; table++) {
      std::vector<std::pair<uint64_t, uint64_t>> format(r.bytes(1));
      for (auto &f : format) f.first = r.uleb(), f.second = r.uleb();
      uint64_t count = r.uleb();
      for (uint64_t i = 0; i < count; i++)
        for (auto &f : format) {
          std::string text;
          switch (f.second) {
            case 0x08: text = r.string(); break;
            case 0x1f: { uint64_t o = r.bytes(4); if (o < line_strings.size()) text = line_strings.c_str() + o; break; }
            case 0x0e: { uint64_t o = r.bytes(4); if (o < strings.size()) text = strings.c_str() + o; break; }
            case 0x0f: r.uleb(); break;
            case 0x0b: r.bytes(1); break;
            case 0x05: r.bytes(2); break;
            case 0x06: r.bytes(4); break;
            case 0x1e: r.bytes(8), r.bytes(8); break;
            default: return;
          }
          if (table == 1 && f.first == 1) names.push_back(text);
        }
    }
    uint32_t file_base = (uint32_t)info->files.size();
    info->files.insert(info->files.end(), names.begin(), names.end());
    r.p = program;
    uint64_t address = 0, file = 1;
    int64_t line = 1;
    auto emit = [&](bool end_of_sequence) {
      info->rows.push_back({address - base, file_base + (uint32_t)file, end_of_sequence ? 0 : (uint32_t)line});
    };
    while (r.p < unit_end) {
      int op = (int)r.bytes(1);
      if (op >= opcode_base) {
        int adjusted = op - opcode_base;
        address += (uint64_t)(adjusted / line_range) * min_length;
        line += line_base + adjusted % line_range;
        emit(false);
      } else if (op == 0) {
        uint64_t n = r.uleb();
        const unsigned char *next = r.p + n;
        int sub = (int)r.bytes(1);
        if (sub == 1) emit(true), address = 0, file = 1, line = 1;
        else if (sub == 2) address = r.bytes(8);
        r.p = next;
      } else {
        switch (op) {
          case 1: emit(false); break;
          case 2: address += r.uleb() * min_length; break;
          case 3: line += r.sleb(); break;
          case 4: file = r.uleb(); break;
          case 8: address += (uint64_t)((255 - opcode_base) / line_range) * min_length; break;
          case 9: address += r.bytes(2); break;
          default:
            for (int i = 0; i < lengths[op]; i++) r.uleb();
        }
      }
    }
    r.p = unit_end;
  }
  std::stable_sort(info->rows.begin(), info->rows.end(), [](const LineRow &a, const LineRow &b) { return a.offset < b.offset; });
}

}  // namespace

bool ObjectInfo::find(uint64_t offset, std::string *file, uint32_t *line) const {
  auto it = std::upper_bound(rows.begin(), rows.end(), offset, [](uint64_t o, const LineRow &r) { return o < r.offset; });
  // Line 0 marks code that clang attributes to no line; the nearest line before it is the best there is.
  while (it != rows.begin()) {
    --it;
    if (it->line == 0) continue;
    *file = it->file < files.size() ? files[it->file] : "";
    *line = it->line;
    return true;
  }
  return false;
}

Image::Image(const std::string &object, ObjectInfo *info, std::vector<std::string> *undefined) {
  const unsigned char *data = (const unsigned char *)object.data();
  const Elf64_Ehdr *header = (const Elf64_Ehdr *)data;
  if (object.size() < sizeof *header || memcmp(header->e_ident, ELFMAG, SELFMAG) != 0 || header->e_type != ET_REL)
    throw std::runtime_error("the compiled kernel is not a relocatable object");
  const Elf64_Shdr *sections = (const Elf64_Shdr *)(data + header->e_shoff);
  int count = header->e_shnum;
  const char *names = (const char *)data + sections[header->e_shstrndx].sh_offset;
  std::vector<uint64_t> address(count, 0);
  std::vector<char> placed(count, 0), is_shared(count, 0);
  size_t relocations = 0, image_size = 0, shared_size = 0;
  const Elf64_Sym *symbols = nullptr;
  const char *symbol_names = nullptr;
  size_t symbol_count = 0;
  for (int i = 0; i < count; i++) {
    const Elf64_Shdr &s = sections[i];
    const char *name = names + s.sh_name;
    if (s.sh_type == SHT_SYMTAB) {
      symbols = (const Elf64_Sym *)(data + s.sh_offset);
      symbol_count = s.sh_size / sizeof(Elf64_Sym);
      symbol_names = (const char *)data + sections[s.sh_link].sh_offset;
    }
    if (s.sh_type == SHT_RELA) relocations += s.sh_size / sizeof(Elf64_Rela);
    if (!(s.sh_flags & SHF_ALLOC) || strncmp(name, ".text.asan", 10) == 0 || strncmp(name, ".init_array", 11) == 0 || strcmp(name, ".eh_frame") == 0) continue;
    placed[i] = 1;
    if (strcmp(name, ".emu_tg") == 0) is_shared[i] = 1;
    size_t &total = is_shared[i] ? shared_size : image_size;
    total = align_up(total, std::max<uint64_t>(s.sh_addralign, 16));
    address[i] = total;
    total += s.sh_size + (is_shared[i] ? kGap : 0);
  }
  size_t linkage = align_up(image_size, 64);
  size_t code_end = align_up(linkage + relocations * 32, 4096);
  arena_static = align_up(shared_size, 64);
  arena_size = arena_static + kDynamicRoom;
  size = code_end + align_up(arena_size, 4096) + 4096;
  base = (unsigned char *)mmap(nullptr, size, PROT_READ | PROT_WRITE | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (base == MAP_FAILED) {
    base = nullptr;
    throw std::runtime_error("no executable memory for a kernel");
  }
  arena = base + code_end;
  for (int i = 0; i < count; i++) {
    if (!placed[i]) continue;
    address[i] += (uint64_t)(is_shared[i] ? arena : base);
    if (sections[i].sh_type != SHT_NOBITS) memcpy((void *)address[i], data + sections[i].sh_offset, sections[i].sh_size);
  }

  std::vector<uint64_t> value(symbol_count, 0);
  for (size_t i = 1; i < symbol_count; i++) {
    const Elf64_Sym &s = symbols[i];
    const char *name = symbol_names + s.st_name;
    if (s.st_shndx == SHN_UNDEF) {
      if (info && strcmp(name, "emu_simd") == 0) info->uses |= EMU_USES_SIMDGROUP;
      if (info && strncmp(name, "emu_matrix_", 11) == 0) info->uses |= EMU_USES_MATRICES;
      continue;
    }
    if (s.st_shndx == SHN_ABS) value[i] = s.st_value;
    else if (s.st_shndx < count) value[i] = address[s.st_shndx] + s.st_value;
    if (strcmp(name, "emu_entry") == 0) entry = (void (*)(const emu_frame *))value[i];
    if (strcmp(name, "emu_entry_describe") == 0) describe = (void (*)(emu_argument_form *))value[i];
    if (info && s.st_shndx < count && is_shared[s.st_shndx] && ELF64_ST_TYPE(s.st_info) == STT_OBJECT) {
      // _ZZ<kernel>E<length><name>: the variable's own name is the last part.
      std::string full = name, own = full;
      size_t e = full.rfind('E');
      if (e != std::string::npos) {
        own = full.substr(e + 1);
        while (!own.empty() && own[0] >= '0' && own[0] <= '9') own.erase(0, 1);
        size_t tail = own.rfind("_0");
        if (tail != std::string::npos && tail + 2 == own.size()) own.resize(tail);
      }
      info->variables.push_back({own, (uint32_t)(value[i] - (uint64_t)arena), (uint32_t)s.st_size});
      info->static_size += (uint32_t)align_up(s.st_size, 16);
    }
  }

  std::string debug_line, line_strings, strings;
  uint64_t *got = (uint64_t *)(base + linkage);
  unsigned char *stubs = base + linkage + relocations * 8;
  size_t used = 0;
  std::vector<int> slot(symbol_count, -1);
  auto resolve = [&](size_t symbol) -> uint64_t {
    const Elf64_Sym &s = symbols[symbol];
    if (s.st_shndx != SHN_UNDEF || symbol == 0) return value[symbol];
    if (!value[symbol]) {
      const char *name = symbol_names + s.st_name;
      value[symbol] = (uint64_t)find_symbol(name);
      if (!value[symbol]) {
        if (undefined && std::find(undefined->begin(), undefined->end(), name) == undefined->end()) undefined->push_back(name);
        value[symbol] = (uint64_t)base;
      }
    }
    return value[symbol];
  };
  auto got_slot = [&](size_t symbol) {
    if (slot[symbol] < 0) {
      slot[symbol] = (int)used++;
      got[slot[symbol]] = resolve(symbol);
      unsigned char *stub = stubs + slot[symbol] * 16;
#if defined(__x86_64__)
      stub[0] = 0xff, stub[1] = 0x25;  // jmp *slot(%rip)
      int32_t d = (int32_t)((unsigned char *)&got[slot[symbol]] - (stub + 6));
      memcpy(stub + 2, &d, 4);
#else
      const uint32_t code[2] = {0x58000050, 0xd61f0200};  // ldr x16, .+8 ; br x16
      memcpy(stub, code, 8);
      memcpy(stub + 8, &got[slot[symbol]], 8);
#endif
    }
    return slot[symbol];
  };
  for (int i = 0; i < count; i++) {
    const Elf64_Shdr &s = sections[i];
    const char *name = names + s.sh_name;
    if (strcmp(name, ".debug_line_str") == 0) line_strings.assign((const char *)data + s.sh_offset, s.sh_size);
    if (strcmp(name, ".debug_str") == 0) strings.assign((const char *)data + s.sh_offset, s.sh_size);
    if (strcmp(name, ".debug_line") == 0 && debug_line.empty()) debug_line.assign((const char *)data + s.sh_offset, s.sh_size);
  }
  for (int i = 0; i < count; i++) {
    const Elf64_Shdr &s = sections[i];
    if (s.sh_type != SHT_RELA) continue;
    int target = (int)s.sh_info;
    bool lines = strcmp(names + sections[target].sh_name, ".debug_line") == 0;
    if (!placed[target] && !lines) continue;
    const Elf64_Rela *r = (const Elf64_Rela *)(data + s.sh_offset);
    for (size_t k = 0; k < s.sh_size / sizeof *r; k++) {
      uint32_t type = (uint32_t)ELF64_R_TYPE(r[k].r_info);
      size_t symbol = ELF64_R_SYM(r[k].r_info);
      unsigned char *p = lines ? (unsigned char *)&debug_line[0] + r[k].r_offset : (unsigned char *)address[target] + r[k].r_offset;
      uint64_t at = (uint64_t)p, a = (uint64_t)r[k].r_addend, v;
      auto put32 = [&](uint64_t x, bool check) {
        int32_t w = (int32_t)x;
        if (check && (int64_t)x != (int64_t)w) throw std::runtime_error("a relocation of a kernel is out of range");
        memcpy(p, &w, 4);
      };
      auto put64 = [&](uint64_t x) { memcpy(p, &x, 8); };
#if defined(__x86_64__)
      switch (type) {
        case R_X86_64_NONE: break;
        case R_X86_64_64: put64(resolve(symbol) + a); break;
        case R_X86_64_PC64: put64(resolve(symbol) + a - at); break;
        case R_X86_64_32: put32(resolve(symbol) + a, false); break;
        case R_X86_64_32S: put32(resolve(symbol) + a, true); break;
        case R_X86_64_PC32:
        case R_X86_64_PLT32:
          if (symbols[symbol].st_shndx == SHN_UNDEF) v = (uint64_t)(stubs + got_slot(symbol) * 16);
          else v = resolve(symbol);
          put32(v + a - at, true);
          break;
        case R_X86_64_GOTPCREL:
        case R_X86_64_GOTPCRELX:
        case R_X86_64_REX_GOTPCRELX: put32((uint64_t)&got[got_slot(symbol)] + a - at, true); break;
        default: throw std::runtime_error("a relocation type of a kernel is not in the emulator: " + std::to_string(type));
      }
#else
      uint32_t word;
      memcpy(&word, p, 4);
      auto page = [](uint64_t x) { return x & ~4095ull; };
      auto adrp = [&](uint64_t to) {
        int64_t d = (int64_t)(page(to) - page(at)) >> 12;
        word = (word & 0x9f00001f) | (uint32_t)((d & 3) << 29) | (uint32_t)(((d >> 2) & 0x7ffff) << 5);
        memcpy(p, &word, 4);
      };
      auto low12 = [&](uint64_t to, int shift) {
        word = (word & 0xffc003ff) | (uint32_t)(((to & 4095) >> shift) << 10);
        memcpy(p, &word, 4);
      };
      switch (type) {
        case 257: put64(resolve(symbol) + a); break;
        case 258: put32(resolve(symbol) + a, false); break;
        case 260: put64(resolve(symbol) + a - at); break;
        case 261: put32(resolve(symbol) + a - at, true); break;
        case 275: case 276: adrp(resolve(symbol) + a); break;
        case 277: case 278: low12(resolve(symbol) + a, 0); break;
        case 284: low12(resolve(symbol) + a, 1); break;
        case 285: low12(resolve(symbol) + a, 2); break;
        case 286: low12(resolve(symbol) + a, 3); break;
        case 299: low12(resolve(symbol) + a, 4); break;
        case 311: adrp((uint64_t)&got[got_slot(symbol)]); break;
        case 312: low12((uint64_t)&got[got_slot(symbol)], 3); break;
        case 282: case 283:
          v = symbols[symbol].st_shndx == SHN_UNDEF ? (uint64_t)(stubs + got_slot(symbol) * 16) : resolve(symbol) + a;
          word = (word & 0xfc000000) | (uint32_t)(((int64_t)(v - at) >> 2) & 0x3ffffff);
          memcpy(p, &word, 4);
          break;
        default: throw std::runtime_error("a relocation type of a kernel is not in the emulator: " + std::to_string(type));
      }
#endif
    }
  }
  if (info && !debug_line.empty()) read_lines(debug_line, line_strings, strings, (uint64_t)base, info);
#if !defined(__x86_64__)
  __builtin___clear_cache((char *)base, (char *)base + code_end);
#endif
  if (!entry) throw std::runtime_error("the compiled kernel has no entry");
}

Image::~Image() {
  if (base) munmap(base, size);
}

}  // namespace emu
