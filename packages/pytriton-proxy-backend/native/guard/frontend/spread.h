// Gives each new HTTP connection to the thread with the fewest: see http_threads.h.
#pragma once

namespace pytriton::guard {

// This thread has accepted an HTTP connection, and the front end is about to look for a thread.
void OnHttpAccepted(int fd);
// Answers how many bytes wait in a pipe, in place of ioctl(FIONREAD). Returns false if the question is not about a
// thread.
bool AnswerPipe(int fd, int* bytes);

}  // namespace pytriton::guard
