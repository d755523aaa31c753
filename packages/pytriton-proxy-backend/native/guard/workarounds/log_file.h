// The log of the server, where that is a file: opened anew once somebody has moved or removed it, as logrotate does.
//
// Bug: tritonserver opens its log once, and goes on to write to a file that was moved or removed.
// Until: no version of tritonserver is known to do better.
#pragma once

#include <sys/types.h>

#include <string>

namespace pytriton::guard {

class LogFile {
 public:
  // Triton has opened it. The front ends do so by themselves, before or after that.
  void OnOpened(const char* path);
  // Whether there is one.
  explicit operator bool() const { return !path_.empty(); }
  // Where another file, or none, has its name now, and can be written: puts that in the place of the old one, wherever this
  // process has it open.
  void Look();

 private:
  std::string path_;
  dev_t device_ = 0;
  ino_t inode_ = 0;
};

// Looks after a log for ever.
void KeepLogFile(LogFile* log);

}  // namespace pytriton::guard
