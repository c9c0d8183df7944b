// A shared library that is loaded at run time: one that only some runs use, or that a machine may lack. It stays
// loaded.
#pragma once

#include <dlfcn.h>

#include <string>

class Library {
 public:
  explicit Library(const std::string& file) : file_(file), handle_(dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL)) {
    if (handle_) return;
    const char* reason = dlerror();
    why_ = reason ? reason : file + " cannot be opened";
  }
  // Null: the library has no such function, or is not loaded.
  template <class F>
  void find(const char* name, F** function) {
    *function = handle_ ? reinterpret_cast<F*>(dlsym(handle_, name)) : nullptr;
    if (!*function && why_.empty()) why_ = file_ + " has no " + name;
  }
  // What was missing first: the library, or a function of it. Empty: nothing.
  const std::string& why() const { return why_; }

 private:
  std::string file_, why_;
  void* handle_;
};
