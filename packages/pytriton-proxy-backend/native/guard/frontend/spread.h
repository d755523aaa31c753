// New connections over HTTP, each given to the thread with the fewest: see http_threads.h.
#pragma once

namespace pytriton::guard {

// This thread has accepted a connection over HTTP, and the front end is about to ask for a thread.
void OnHttpAccepted(int fd);
// Answers how many bytes wait in a pipe, in place of ioctl(FIONREAD). False where the question is not about a thread.
bool AnswerPipe(int fd, int* bytes);

}  // namespace pytriton::guard
