// Defines every class once, bases first. Knows only that there are three groups of them.
#include "metal.h"

namespace device {

void define_root_classes();

void define_all_classes() {
  define_root_classes();
  define_foundation();
  define_metal_device();
  define_metal_library();
  define_metal_archive();
  define_metal_commands();
}

}  // namespace device
