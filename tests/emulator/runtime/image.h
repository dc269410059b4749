// A compiled kernel in memory: loads a relocatable object and reads its line table. Each copy has an arena of its own
// for threadgroup memory, since the code addresses its threadgroup variables directly. Knows nothing of threads.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "../include/emulator/abi.h"
#include "emulator.h"

namespace emu {

struct LineRow {
  uint64_t offset;  // into the image
  uint32_t file, line;
};

struct SharedVariable {
  std::string name;
  uint32_t offset, size;  // in the arena
};

// What all copies of one object share.
struct ObjectInfo {
  std::vector<std::string> files;
  std::vector<LineRow> rows;              // sorted by offset
  std::vector<SharedVariable> variables;  // threadgroup variables
  uint32_t static_size = 0;               // bytes of them, as Metal counts
  uint32_t uses = 0;                      // EMU_USES_*
  bool find(uint64_t offset, std::string *file, uint32_t *line) const;
};

class Image {
 public:
  // Throws std::runtime_error, or fills `undefined` with names that nothing defines.
  Image(const std::string &object, ObjectInfo *info, std::vector<std::string> *undefined);
  ~Image();
  Image(const Image &) = delete;

  void (*entry)(const emu_frame *) = nullptr;
  void (*describe)(emu_argument_form *) = nullptr;
  unsigned char *base = nullptr;
  size_t size = 0;
  unsigned char *arena = nullptr;  // threadgroup memory: variables first, then room for the dynamic part
  size_t arena_size = 0, arena_static = 0;
};

}  // namespace emu
