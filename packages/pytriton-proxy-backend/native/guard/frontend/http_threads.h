// The threads of the HTTP front end, over which connections are spread.
//
// The front end (libevhtp 1.2.18) asks how many bytes wait in the pipe of each of its threads, and gives a new
// connection to the first thread with none. That is nearly always the same one, so all callers who keep their
// connections would share one thread, whatever the number of threads and processors. So only the thread with the fewest
// connections is reported as having an empty pipe. A few connections stay on a few threads, because each further thread
// is another one to wake.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <optional>
#include <vector>

namespace pytriton::guard {

// How many connections a thread has. Never freed, because any thread may close a connection at any time.
using ThreadLoad = std::atomic<int>;

// The threads of one front end. Used by the one thread that accepts its connections.
class HttpThreads {
 public:
  explicit HttpThreads(unsigned processors) : least_(std::max(processors, 1u)) {}

  struct Answer {
    int bytes;           // how many bytes are reported for the pipe
    ThreadLoad* chosen;  // the load of this pipe's thread if it gets the connection, otherwise null
  };

  // A connection was accepted, and the front end is about to look for a thread.
  void OnAccept(int connection);
  // Answers the question about one pipe; empty if it is not about a thread of the front end.
  std::optional<Answer> Ask(int pipe);
  // The connection for which a thread is being looked for, or -1.
  int connection() const { return connection_; }

 private:
  struct Thread {
    int pipe;
    ThreadLoad* load;
  };

  // The thread that gets the next connection; null before the first.
  const Thread* Choose() const;

  const size_t least_;  // so many threads are used as soon as there are as many connections
  std::vector<Thread> threads_;
  int chosen_pipe_ = -1;  // -1 for the first connection
  int connection_ = -1;
};

}  // namespace pytriton::guard
