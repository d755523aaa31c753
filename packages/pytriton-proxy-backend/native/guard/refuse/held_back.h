// Bytes of callers that the guard has read and the server is not to see yet.
//
// The server's parser (libevhtp 1.2.18) takes the byte behind what it was given, which is left from something else, into a path
// that is not whole: it would see another path than the guard. So the first line of a request is held back until it is whole.
//
// It also resumes a connection with the head of an answer in chunks, and ends one that has more to read then; and it reads
// the next request of a connection into the answer of the one in front. So what is behind a request is held back until the
// answer is written to its end: the server sees one request at a time.
//
// And what is held of a head, here or by the server, is not held for ever.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <cstddef>
#include <cstdint>

#include "../connections.h"

namespace pytriton::guard {

// How much the front end (libevent 2.1.12) reads at once, which is also the longest first line that is accepted.
constexpr size_t kMostFirstLine = 4096;

// As readv, in front of which the bytes stand that are held back. Fails with ENOBUFS where a first line is longer than what
// the server reads at once.
ssize_t ReadBehindHeld(Connection* connection, int fd, const iovec* parts, int count);

// Takes the line ends in front of a request out of the `size` bytes that were read, as the server waits for ever behind them.
// Returns how many bytes are left.
size_t DropLineEnds(const iovec* parts, int count, size_t size);

// Holds back all but the first `given` of the `size` bytes that were read. Returns what readv is to return.
ssize_t HoldBack(Connection* connection, const iovec* parts, int count, size_t given, size_t size);

// As readv, of a connection whose answer is being written: nothing is read, and whether its caller has left is seen.
ssize_t AwaitAnswer(Connection* connection, int fd, const iovec* parts, int count);

// The answer is written: what comes behind it may be read.
void ReadOn(Connection* connection, int fd);

// How many bytes can be read, of a connection with bytes that are held back. False for any other.
bool CountReadable(int fd, int* bytes);

// Notes whether the head that a connection sends is whole.
void WatchHead(Connection* connection, int fd);
// The longest that this thread may wait until a head is late; and ends those that are.
int TimeoutOfHeads(int timeout_ms);
void EndLateHeads();

}  // namespace pytriton::guard
