// A cache whose values are made once, however many threads ask at the same time. No lock is held while a value is made, so that
// other keys are not held up, and a value that could not be made is not remembered. Knows nothing of what it holds.
#pragma once

#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>

namespace launcher {

template <class Value>
class OnceCache {
 public:
  using Shared = std::shared_ptr<const Value>;

  // `make` answers a Shared or throws; everyone who waited for it gets the same.
  template <class Make>
  Shared get(std::string_view key, Make&& make) {
    std::shared_ptr<Entry> entry;
    {
      std::scoped_lock guard(mutex_);
      auto found = entries_.find(key);
      if (found != entries_.end()) {
        if (found->second->ready) return found->second->ready;
        entry = found->second;
      }
    }
    if (entry) return entry->future.get();
    bool mine = false;
    {
      std::scoped_lock guard(mutex_);
      auto fresh = std::make_shared<Entry>(key);
      auto [at, inserted] = entries_.emplace(std::string_view(fresh->key), fresh);
      entry = at->second;
      mine = inserted;
    }
    if (!mine) return entry->future.get();
    try {
      Shared made = make();
      {
        std::scoped_lock guard(mutex_);
        entry->ready = made;
      }
      entry->promise.set_value(made);
      return made;
    } catch (...) {
      {
        std::scoped_lock guard(mutex_);
        entries_.erase(entry->key);
      }
      entry->promise.set_exception(std::current_exception());
      throw;
    }
  }

 private:
  struct Entry {
    explicit Entry(std::string_view name) : key(name) {}
    const std::string key;
    Shared ready;  // guarded by the cache's mutex
    std::promise<Shared> promise;
    std::shared_future<Shared> future = promise.get_future().share();
  };

  std::mutex mutex_;
  std::unordered_map<std::string_view, std::shared_ptr<Entry>> entries_;
};

}  // namespace launcher
