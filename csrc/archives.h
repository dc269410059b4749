// Compiled pipelines that outlive the process: a binary archive for each, in a folder that the host names. Whatever is wrong with
// folder or archive, a pipeline is compiled as if there were none. Knows Metal and files; not what is compiled.
#pragma once

#include <Metal/Metal.hpp>

#include <cstdint>
#include <string>
#include <string_view>

namespace launcher {

// Keeps pipelines in `folder` from here on, "" for nowhere. `version` is of the package: another one finds nothing.
void keep_pipelines(std::string folder, std::string version);

// 128 bits of a text in hexadecimal, of which equal ones mean the same text as far as anybody will see.
std::string digest(std::string_view text);

// A new reference to the pipeline of a function that is `key`: all that it is made of, device and macOS too. From its archive
// where there is one, else compiled and put into one. nullptr with Metal's error where it cannot be compiled.
MTL::ComputePipelineState* make_pipeline(MTL::Device* device, const MTL::Function* function, std::string_view key,
                                         NS::Error** error);

}  // namespace launcher
