// Files are named after what is in them: the digest of a pipeline's key, then that of the bytes. So a file is never written to
// again, only replaced by one of another name; Metal sees none that is torn, and processes do not disturb each other.
#include "archives.h"

#include <Foundation/Foundation.hpp>
#include <dirent.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <mutex>

#include "statistics.h"

namespace launcher {
namespace {

constexpr const char* kSuffix = ".metallib";

struct Kept {
  std::string folder, version;
};

std::mutex& mutex() {
  static auto* made = new std::mutex;
  return *made;
}

Kept& kept() {
  static auto* made = new Kept;
  return *made;
}

NS::URL* url_of(const std::string& path) {
  return NS::URL::fileURLWithPath(NS::String::string(path.c_str(), NS::UTF8StringEncoding));
}

std::string digest_of_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  const std::string bytes{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  return file ? digest(bytes) : "";
}

// The path of a whole archive whose name begins with `name`; those that are not whole go. "" where there is none.
std::string find(const std::string& folder, const std::string& name) {
  std::string found;
  DIR* entries = opendir(folder.c_str());
  if (!entries) return found;
  while (const dirent* entry = found.empty() ? readdir(entries) : nullptr) {  // NOLINT(concurrency-mt-unsafe): nobody else has it
    const std::string file = entry->d_name, path = folder + "/" + file;
    if (file.rfind(name + "-", 0) != 0) continue;
    if (file == name + "-" + digest_of_file(path) + kSuffix) found = path;
    else unlink(path.c_str());
  }
  closedir(entries);
  return found;
}

NS::SharedPtr<MTL::BinaryArchive> archive_at(MTL::Device* device, NS::URL* url) {
  auto descriptor = NS::TransferPtr(MTL::BinaryArchiveDescriptor::alloc()->init());
  if (url) descriptor->setUrl(url);
  return NS::TransferPtr(device->newBinaryArchive(descriptor.get(), nullptr));
}

void store(const MTL::BinaryArchive* archive, const std::string& folder, const std::string& name) {
  static std::atomic<unsigned> written{0};
  const std::string beside = folder + "/" + std::to_string(getpid()) + "-" + std::to_string(written++) + ".part";
  const bool whole = const_cast<MTL::BinaryArchive*>(archive)->serializeToURL(url_of(beside), nullptr);
  const std::string bytes = whole ? digest_of_file(beside) : "";
  if (!bytes.empty() && std::rename(beside.c_str(), (folder + "/" + name + "-" + bytes + kSuffix).c_str()) == 0)
    count(statistics().pipelines_kept);
  else unlink(beside.c_str());
}

}  // namespace

void keep_pipelines(std::string folder, std::string version) {
  std::scoped_lock guard(mutex());
  kept() = {std::move(folder), std::move(version)};
}

std::string digest(std::string_view text) {
  uint64_t a = 0xcbf29ce484222325, b = 0x9e3779b97f4a7c15;  // FNV-1a, and a rotating sum beside it
  for (unsigned char c : text) {
    a = (a ^ c) * 0x100000001b3;
    b = (b << 23 | b >> 41) * 0xff51afd7ed558ccd + c;
  }
  char out[33];
  std::snprintf(out, sizeof out, "%016llx%016llx", static_cast<unsigned long long>(a), static_cast<unsigned long long>(b));
  return out;
}

MTL::ComputePipelineState* make_pipeline(MTL::Device* device, const MTL::Function* function, std::string_view key,
                                         NS::Error** error) {
  Kept now;
  {
    std::scoped_lock guard(mutex());
    now = kept();
  }
  // an archive takes specialised functions from macOS 15 on ("Creating binary archives from device-built pipeline state
  // objects", developer.apple.com)
  const bool able = NS::ProcessInfo::processInfo()->isOperatingSystemAtLeastVersion(NS::OperatingSystemVersion{15, 0, 0});
  MTL::ComputePipelineState* made = nullptr;
  if (now.folder.empty() || !able) {
    made = device->newComputePipelineState(function, error);
    if (made) count(statistics().pipelines);
    return made;
  }
  const std::string name = digest(now.version + '\0' + std::string(key));
  auto descriptor = NS::TransferPtr(MTL::ComputePipelineDescriptor::alloc()->init());
  descriptor->setComputeFunction(function);
  const std::string path = find(now.folder, name);
  if (!path.empty()) {
    if (auto archive = archive_at(device, url_of(path))) {
      descriptor->setBinaryArchives(NS::Array::array(archive.get()));
      made = device->newComputePipelineState(descriptor.get(), MTL::PipelineOptionFailOnBinaryArchiveMiss, nullptr, nullptr);
      descriptor->setBinaryArchives(nullptr);
    }
    if (made) {
      count(statistics().pipelines_loaded);
      return made;
    }
    unlink(path.c_str());  // of no use to anybody
  }
  // compiled by the archive, from which the pipeline then takes it
  auto archive = archive_at(device, nullptr);
  if (archive && !archive->addComputePipelineFunctions(descriptor.get(), nullptr)) archive.reset();
  if (archive) descriptor->setBinaryArchives(NS::Array::array(archive.get()));
  made = device->newComputePipelineState(descriptor.get(), MTL::PipelineOptionNone, nullptr, error);
  if (!made) return nullptr;
  count(statistics().pipelines);
  if (archive) store(archive.get(), now.folder, name);
  return made;
}

}  // namespace launcher
