// A reader for JSON as Python's json module writes it, NaN and Infinity included. Knows nothing of plans.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace launcher {

struct Json {
  enum Kind { kNull, kBool, kInteger, kNumber, kString, kList, kObject } kind = kNull;
  bool boolean = false;
  int64_t integer = 0;
  double number = 0;  // also set for integers
  std::string string;
  std::vector<Json> items;
  std::vector<std::pair<std::string, Json>> members;

  const Json* find(std::string_view key) const {
    for (const auto& member : members)
      if (member.first == key) return &member.second;
    return nullptr;
  }
};

// Throws Error(kInvalidPlan) with the byte where the text stops being JSON.
Json parse_json(std::string_view text);

}  // namespace launcher
