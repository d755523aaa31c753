// Bytes of callers that the guard has read and that the server must not see yet.
//
// If a path is incomplete, the server's parser (libevhtp 1.2.18) also takes the byte after what it was given, which is
// left from something else, and so sees another path than the guard. So the first line of a request is held back until
// it is complete.
//
// The server also has two bugs with bytes after a request: it ends a connection that has more to read when it resumes
// it with the head of an answer in chunks, and it reads the next request of a connection while it answers the one in
// front. So the bytes after a request are held back until its answer is completely written, and the server sees one
// request at a time.
//
// A head that does not become complete, here or in the server, is dropped after a time.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <cstddef>
#include <cstdint>

#include "../connections.h"

namespace pytriton::guard {

// How much the front end (libevent 2.1.12) reads at once; a first line must not be longer.
constexpr size_t kMostFirstLine = 4096;

// Works like readv, but first returns the bytes that are held back. Fails with ENOBUFS if a first line is longer than
// the server reads at once.
ssize_t ReadBehindHeld(Connection* connection, int fd, const iovec* parts, int count);

// Removes the line ends before a request from the `size` bytes that were read, because the server would wait for ever
// after them. Returns how many bytes are left.
size_t DropLineEnds(const iovec* parts, int count, size_t size);

// Holds back all but the first `given` of the `size` bytes that were read. Returns the result for readv.
ssize_t HoldBack(Connection* connection, const iovec* parts, int count, size_t given, size_t size);

// Works like readv for a connection whose answer is being written: reads nothing, and checks whether its caller has
// left.
ssize_t AwaitAnswer(Connection* connection, int fd, const iovec* parts, int count);

// The answer is written, so the bytes after its request may be read.
void ReadOn(Connection* connection, int fd);

// How many bytes can be read from a connection with bytes that are held back. Returns false for any other one.
bool CountReadable(int fd, int* bytes);

// Notes whether the head that a connection sends is complete.
void WatchHead(Connection* connection, int fd);
// The longest time that this thread may wait until a head is late. Also ends connections whose heads are late.
int TimeoutOfHeads(int timeout_ms);
void EndLateHeads();

}  // namespace pytriton::guard
