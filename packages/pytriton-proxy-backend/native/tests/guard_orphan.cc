// A server whose starter is gone, and that heeds no signal but SIGKILL: it ends all the same.

#include <poll.h>
#include <unistd.h>

#include <csignal>

#include "../guard/workarounds/orphans.h"
#include "check.h"

int main() {
  int ends[2];
  CHECK(pipe(ends) == 0);
  const pid_t starter = fork();
  CHECK(starter >= 0);
  if (starter == 0) {
    if (fork() == 0) {
      signal(SIGTERM, SIG_IGN);
      pytriton::guard::EndWithStarter();
      for (;;) pause();
    }
    sleep(1);
    _exit(0);
  }
  // The server has the last copy of this end.
  close(ends[1]);
  pollfd ended{ends[0], POLLIN, 0};
  CHECK(poll(&ended, 1, 500'000) == 1);
}
