#include "log_file.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <thread>

namespace pytriton::guard {

namespace {

// How often the guard checks whether the log file was moved.
constexpr std::chrono::seconds kLogFilePause{1};

}  // namespace

void LogFile::OnOpened(const char* path) {
  struct stat status{};
  path_ = path != nullptr && stat(path, &status) == 0 && S_ISREG(status.st_mode) ? path : "";
  device_ = status.st_dev;
  inode_ = status.st_ino;
}

void LogFile::Look() {
  struct stat status{};
  if (stat(path_.c_str(), &status) == 0 && status.st_dev == device_ && status.st_ino == inode_) return;
  // If no new file can be made, for instance because its folder is gone, the old one stays.
  const int log = open(path_.c_str(), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0666);
  if (log < 0) return;
  DIR* const folder = opendir("/proc/self/fd");
  if (folder != nullptr && fstat(log, &status) == 0 && S_ISREG(status.st_mode)) {
    while (const dirent* entry = readdir(folder)) {
      const int fd = std::atoi(entry->d_name);
      struct stat found{};
      // Threads that write at this moment write into one file or the other.
      if (fstat(fd, &found) == 0 && found.st_dev == device_ && found.st_ino == inode_) {
        dup3(log, fd, (fcntl(fd, F_GETFD) & FD_CLOEXEC) != 0 ? O_CLOEXEC : 0);
      }
    }
    device_ = status.st_dev;
    inode_ = status.st_ino;
  }
  if (folder != nullptr) closedir(folder);
  close(log);
}

void KeepLogFile(LogFile* log) {
  for (;; std::this_thread::sleep_for(kLogFilePause)) log->Look();
}

}  // namespace pytriton::guard
