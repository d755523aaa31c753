// Arenas, settings, strings and records of the native proxy, without Triton. `unit NAME` runs one test.
#include <fcntl.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>
#include <string>

#include "../proxy/control.h"
#include "../proxy/wire/arena.h"
#include "../proxy/wire/record.h"
#include "../proxy/wire/settings.h"
#include "check.h"

using namespace pytriton;

namespace {

constexpr uint64_t kMiB = 1u << 20;
constexpr uint64_t kGiB = 1u << 30;

Block Take(Arena& arena, uint64_t length) {
  Block block;
  Arena::Result result = arena.Allocate(length, &block);
  if (result == Arena::Result::kNeedSegment) {
    std::string error;
    CHECK(arena.AddSegment(length, &error) != nullptr);
    result = arena.Allocate(length, &block);
  }
  CHECK(result == Arena::Result::kOk);
  CHECK(block.offset % 64 == 0 && block.length == length);
  return block;
}

void ArenaAllocateAndMerge() {
  Arena arena(8 * kMiB);
  const Block a = Take(arena, 1);
  const Block b = Take(arena, 65);
  const Block c = Take(arena, 64);
  CHECK(a.offset == 0 && b.offset == 64 && c.offset == 192);
  CHECK(arena.in_use() == 64 + 128 + 64 && arena.size() == kMiB);
  CHECK(arena.IsInUse(a.segment, 64) && !arena.IsInUse(a.segment, 65));
  CHECK(!arena.Release(a.segment, 65));
  CHECK(!arena.Release(a.segment + 1, 0));
  CHECK(arena.Release(b.segment, b.offset));
  CHECK(!arena.Release(b.segment, b.offset));
  const Block again = Take(arena, 128);
  CHECK(again.offset == b.offset);  // the hole fits
  // Freed in any order, neighbours become one piece.
  CHECK(arena.Release(a.segment, a.offset) && arena.Release(c.segment, c.offset));
  CHECK(arena.Release(again.segment, again.offset));
  CHECK(arena.in_use() == 0);
  CHECK(Take(arena, kMiB).offset == 0);
  std::memset(Take(arena, 3 * kMiB).data, 7, 3 * kMiB);
}

void ArenaGrowsToItsBudget() {
  Arena arena(4 * kMiB);
  const Block first = Take(arena, kMiB);
  const Block second = Take(arena, kMiB);
  CHECK(first.segment != second.segment && arena.size() == 2 * kMiB);
  Take(arena, 2 * kMiB);
  CHECK(arena.size() == 4 * kMiB);
  Block block;
  CHECK(arena.Allocate(1, &block) == Arena::Result::kFull);
  CHECK(arena.Allocate(5 * kMiB, &block) == Arena::Result::kFull);
  CHECK(arena.Release(first.segment, first.offset));
  CHECK(arena.Allocate(kMiB, &block) == Arena::Result::kOk);

  Arena small(1000);  // below the usual first segment
  CHECK(Take(small, 900).offset == 0);
  CHECK(small.Allocate(200, &block) == Arena::Result::kFull);
}

void ArenaTrim() {
  Arena arena(64 * kMiB);
  const Block small = Take(arena, 100);
  const Block large = Take(arena, 8 * kMiB);
  CHECK(arena.Trim(1000, 10).empty());  // in use
  CHECK(arena.Release(large.segment, large.offset));
  CHECK(arena.Trim(2000, 10).empty());  // idle from now on
  CHECK(arena.Trim(2009, 10).empty());
  CHECK((arena.Trim(2010, 10) == std::vector<uint32_t>{large.segment}));
  CHECK(arena.size() == kMiB);
  CHECK(arena.Release(small.segment, small.offset));
  CHECK(arena.Trim(3000, 10).empty() && arena.Trim(4000, 10).empty());  // the first MiB stays
  // Used again in between: the clock starts again.
  const Block other = Take(arena, 8 * kMiB);
  CHECK(other.segment != large.segment);
  CHECK(arena.Release(other.segment, other.offset) && arena.Trim(5000, 10).empty());
  const Block back = Take(arena, 8 * kMiB);
  CHECK(back.segment == other.segment && arena.Trim(5020, 10).empty());
  CHECK(arena.Release(back.segment, back.offset) && arena.Trim(5030, 10).empty());
  CHECK(arena.Trim(5040, 10).size() == 1);
}

void ArenaDropsWhatIsUnused() {
  Arena arena(8 * kMiB);
  const Block small = Take(arena, 100);
  const Block large = Take(arena, 4 * kMiB);
  CHECK(arena.Release(large.segment, large.offset));
  Block block;
  CHECK(arena.Allocate(6 * kMiB, &block) == Arena::Result::kFull);
  CHECK((arena.DropUnused() == std::vector<uint32_t>{large.segment}) && arena.size() == kMiB);
  CHECK(Take(arena, 6 * kMiB).offset == 0);
  CHECK(arena.Release(small.segment, small.offset));
  CHECK((arena.DropUnused() == std::vector<uint32_t>{small.segment}));
}

int Memfd(uint64_t size, int seals) {
  const int fd = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  CHECK(fd >= 0 && ftruncate(fd, static_cast<off_t>(size)) == 0);
  if (seals != 0) CHECK(fcntl(fd, F_ADD_SEALS, seals) == 0);
  return fd;
}

void SegmentsOfAPeer() {
  std::string error;
  CHECK(Segment::Attach(1, Memfd(4096, F_SEAL_SHRINK), 4096, &error) != nullptr);
  CHECK(Segment::Attach(1, Memfd(4096, F_SEAL_SHRINK), 0, &error) == nullptr);
  CHECK(Segment::Attach(1, Memfd(4096, F_SEAL_SHRINK), 4097, &error) == nullptr);
  CHECK(error.find("4097") != std::string::npos);
  error.clear();
  CHECK(Segment::Attach(1, Memfd(4096, 0), 4096, &error) == nullptr);
  CHECK(error.find("sealed against shrinking") != std::string::npos);
  CHECK(Segment::Attach(1, Memfd(4096, F_SEAL_GROW), 4096, &error) == nullptr);
  CHECK(Segment::Attach(1, open("/dev/null", O_RDONLY | O_CLOEXEC), 4096, &error) == nullptr);
  CHECK(Segment::Create(1, uint64_t{1} << 63, &error) == nullptr);
  // Ours is sealed itself, and no descriptor is left behind by any of the refusals.
  auto ours = Segment::Create(2, 4096, &error);
  CHECK(ours != nullptr && ftruncate(ours->fd(), 0) != 0);
  ours->CloseFd();
  CHECK(ours->fd() == -1);
  const int next = open("/dev/null", O_RDONLY | O_CLOEXEC);
  CHECK(next < 8);
  close(next);
}

void Strings() {
  std::vector<uint64_t> ends;
  const uint8_t raw[] = {2, 0, 0, 0, 'a', 'b', 0, 0, 0, 0, 1, 0, 0, 0, 'c'};
  CHECK(SplitStrings(raw, sizeof(raw), {1, 2}, &ends) && (ends == std::vector<uint64_t>{6, 15}));
  CHECK(SplitStrings(raw, sizeof(raw), {0, 3, 0}, &ends) && (ends == std::vector<uint64_t>{0, 15, 15}));
  CHECK(!SplitStrings(raw, sizeof(raw), {2}, &ends));
  CHECK(!SplitStrings(raw, sizeof(raw), {4}, &ends));
  CHECK(!SplitStrings(raw, sizeof(raw), {UINT64_MAX}, &ends));
  CHECK(!SplitStrings(raw, sizeof(raw) - 1, {3}, &ends));
  CHECK(!SplitStrings(raw, 3, {1}, &ends));
  CHECK(WrongStrings(raw, sizeof(raw), 3).empty() && WrongStrings(nullptr, 0, 0).empty());
  CHECK(WrongStrings(raw, sizeof(raw), 2) == "expected nothing behind its 2 strings, got 5 bytes");
  CHECK(WrongStrings(raw, sizeof(raw), UINT64_MAX) == "string 3 of 18446744073709551615: expected 4 bytes for its length, got 0");
  CHECK(WrongStrings(raw, sizeof(raw) - 1, 3) == "string 2 of 3: expected 1 bytes, as its length says, got 0");
  CHECK(WrongStrings(raw, 9, 3) == "string 1 of 3: expected 4 bytes for its length, got 3");
  CHECK(SplitStrings(nullptr, 0, {}, &ends) && SplitStrings(nullptr, 0, {0}, &ends));
  const uint8_t huge[] = {0xff, 0xff, 0xff, 0xff};
  CHECK(!SplitStrings(huge, sizeof(huge), {1}, &ends));
}

std::string Refused(const std::string& text) {
  Settings settings;
  std::string error;
  CHECK(!ParseSettings(text, &settings, &error));
  return error;
}

bool Has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

void SettingsText() {
  Settings settings;
  std::string error;
  CHECK(ParseSettings(
      "# comment\n\n format = 1\r\nendpoint=/a = b\nbatching = false\n\tdecoupled = true\nattach_timeout_ms = 0\n"
      "arena_budget_bytes = 18446744073709551615\narena_idle_ms = 7\nmax_waiting = 3",
      &settings, &error));
  CHECK(settings.endpoint == "/a = b" && !settings.batching && settings.decoupled && settings.attach_timeout_ms == 0);
  CHECK(settings.arena_budget_bytes == UINT64_MAX && settings.arena_idle_ms == 7);
  CHECK(settings.max_waiting == 3);
  const std::string good = "format = 1\nendpoint = /a\n";
  CHECK(Has(Refused(""), "expected 'format = 1'"));
  CHECK(Has(Refused("format = 2\nendpoint = /a\n"), "got '2'"));
  CHECK(Has(Refused("format = 1\n"), "endpoint"));
  CHECK(Has(Refused(good + "batching = yes\n"), "line 3: expected true or false, got 'batching = yes'"));
  CHECK(Has(Refused(good + "attach_timeout_ms = -1\n"), "line 3: expected a whole number"));
  CHECK(Has(Refused(good + "attach_timeout_ms = 18446744073709551616\n"), "a whole number"));
  CHECK(Has(Refused(good + "attach_timeout_ms =\n"), "a whole number"));
  CHECK(Has(Refused(good + "arena_budget_bytes = 0\n"), "above 0"));
  CHECK(Has(Refused(good + "arena_idle_ms = 1s\n"), "a whole number"));
  CHECK(Has(Refused(good + "colour = red\n"), "a key that this version knows"));
  CHECK(Has(Refused(good + "nonsense\n"), "'key = value'"));
  CHECK(Has(Refused("format = 1\nendpoint = a\n"), "an absolute path"));
  CHECK(Has(Refused("format = 1\nendpoint = /" + std::string(107, 'x') + "\n"), "108 bytes"));
  CHECK(ParseSettings("format = 1\nendpoint = /" + std::string(106, 'x') + "\n", &settings, &error));
}

// Numbers beyond 32 bits, in memory that nobody ever touches.
void BeyondFourGiB() {
  // A batch with a tensor of 5 GiB in front of a small one: the place of the second needs 64 bits. Its pieces are
  // left out, so that only the metadata and the second payload are written.
  const char tail[] = "tail";
  BatchSource source;
  source.requests.resize(1);
  source.dims = {static_cast<int64_t>(5 * kGiB), 4};
  source.pieces = {{tail, 4}};
  source.tensors = {{"large", 2, kWholeBatch, 0, 1, 0, 0, 5 * kGiB}, {"tail", 2, 0, 1, 1, 0, 1, 4}};
  BatchLayout layout;
  std::string error;
  CHECK(LayoutBatch(source, &layout, &error));
  CHECK(layout.record_length == layout.metadata_length + 5 * kGiB + 64);

  Arena arena(16 * kGiB);
  Block filler = Take(arena, 5 * kGiB);
  const Block block = Take(arena, layout.record_length);
  CHECK(block.segment != filler.segment || block.offset > 4 * kGiB);
  WriteBatch(source, layout, 1, 0, block.data);
  TensorEntry entry;
  std::memcpy(&entry, block.data + 64 + 80 + 48, sizeof(entry));
  CHECK(entry.payload_offset == layout.metadata_length + 5 * kGiB);
  CHECK(std::memcmp(block.data + entry.payload_offset, "tail", 4) == 0);

  // A response at 6 GiB of a segment, its second payload another 5 GiB further on.
  auto segment = Segment::Create(9, 12 * kGiB, &error);
  CHECK(segment != nullptr);
  uint8_t* record = segment->data() + 6 * kGiB;
  RecordHeader header{};
  header.magic = kResponseMagic;
  header.entry_count = 1;
  header.tensor_count = 2;
  header.batch = 5;
  header.metadata_length = 320;
  header.record_length = 320 + 5 * kGiB + 4;
  header.entries_offset = 64;
  header.tensors_offset = 112;
  ResponseEntry answer{};
  answer.flags = kResponseFinal;
  TensorEntry large{};
  large.name = {240, 1};
  large.dtype = 2;
  large.dims_count = 1;
  large.dims_offset = 208;
  large.payload_offset = 320;
  large.payload_length = 5 * kGiB;
  TensorEntry small = large;
  small.dims_offset = 216;
  small.payload_offset = 320 + 5 * kGiB;
  small.payload_length = 4;
  const int64_t dims[] = {static_cast<int64_t>(5 * kGiB), 4};
  std::memcpy(record, &header, sizeof(header));
  std::memcpy(record + 64, &answer, sizeof(answer));
  std::memcpy(record + 112, &large, sizeof(large));
  std::memcpy(record + 160, &small, sizeof(small));
  std::memcpy(record + 208, dims, sizeof(dims));
  std::memcpy(record + 240, "y", 2);
  std::memcpy(record + small.payload_offset, "tail", 4);
  ResponseRecord parsed;
  CHECK(parsed.Parse(record, 6 * kGiB, 5, 1, false, &error));
  CHECK(parsed.tensors()[0].payload_length == 5 * kGiB);
  CHECK(std::memcmp(parsed.tensors()[1].payload, "tail", 4) == 0);
  CHECK(!parsed.Parse(record, header.record_length - 1, 5, 1, false, &error));

  BatchSource absurd;
  absurd.requests.resize(1);
  absurd.dims = {1};
  absurd.tensors = {{"a", 2, 0, 0, 1, 0, 0, UINT64_MAX - 512}, {"b", 2, 0, 0, 1, 0, 0, 1024}};
  CHECK(!LayoutBatch(absurd, &layout, &error) && Has(error, "64 bits"));
  absurd.tensors.resize(1);
  absurd.parameters.resize(1);
  absurd.parameters[0].text = {tail, size_t{2} * kGiB};
  CHECK(!LayoutBatch(absurd, &layout, &error) && Has(error, "metadata"));
  // The largest that passes has exactly what the protocol allows.
  absurd.tensors[0].length = 1;
  size_t passes = 0;
  size_t fails = size_t{2} * kGiB;
  while (fails - passes > 1) {
    const size_t middle = passes + (fails - passes) / 2;
    absurd.parameters[0].text = {tail, middle};
    (LayoutBatch(absurd, &layout, &error) ? passes : fails) = middle;
  }
  absurd.parameters[0].text = {tail, passes};
  CHECK(LayoutBatch(absurd, &layout, &error) && layout.metadata_length == kMaxMetadata);

  // Of a response, whose metadata would be copied: refused before that.
  header.metadata_length = kMaxMetadata + 64;
  header.record_length = kMaxMetadata + 128;
  std::memcpy(record, &header, sizeof(header));
  CHECK(!parsed.Parse(record, 6 * kGiB, 5, 1, false, &error) && Has(error, std::to_string(kMaxMetadata + 64)));
}

// What a supervisor answers: a frame as it is, then bytes that are none, and the end of the connection.
void ControlFrames() {
  int fds[2];
  CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, fds) == 0);
  std::string error;
  Frame frame;
  {
    ControlConnection mine(fds[0]);
    ControlConnection theirs(fds[1]);
    const Frame sent{FrameKind::kModel, {"name", "", std::string("a\0b", 3), std::string(100000, 'x')}};
    CHECK(mine.Send(sent, &error) && theirs.Receive(&frame, &error));
    CHECK(frame.kind == FrameKind::kModel && frame.fields == sent.fields);
    CHECK(theirs.Send({FrameKind::kOk, {}}, &error) && mine.Receive(&frame, &error));
    CHECK(frame.kind == FrameKind::kOk && frame.fields.empty());
    Frame huge{FrameKind::kModel, {std::string(kMaxFrameBytes, 'x')}};
    CHECK(!mine.Send(huge, &error) && Has(error, std::to_string(kMaxFrameBytes)));
  }
  const std::string bad[] = {
      std::string("\x03\0\0\0\x64\0\0", 7),                               // shorter than its head
      std::string("\x08\0\0\0\x64\0\x01\0\x01\0\0\0", 12),               // a field that reaches past it
      std::string("\x05\0\0\0\x64\0\0\0y", 9),                             // bytes behind its fields
      std::string("\x06\0\0\0\x64\0\x01\0\0\0", 10),                       // half a length
      std::string("\xff\xff\xff\xff", 4), std::string("\x04\0\0", 3), ""};  // too large, cut off, nothing
  for (const std::string& bytes : bad) {
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, fds) == 0);
    ControlConnection mine(fds[0]);
    CHECK(write(fds[1], bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()));
    CHECK(shutdown(fds[1], SHUT_WR) == 0);
    error.clear();
    CHECK(!mine.Receive(&frame, &error) && !error.empty());
    close(fds[1]);
    CHECK(mine.HasEnded() && mine.WaitEnd(-1));
    CHECK(!mine.Send({FrameKind::kOk, {}}, &error) && Has(error, "has ended"));
    mine.Finish();
  }
  // Whoever waits is told that nobody needs it any more.
  CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, fds) == 0);
  ControlConnection mine(fds[0]);
  const int stop_fd = eventfd(1, EFD_CLOEXEC);
  CHECK(stop_fd >= 0 && !mine.HasEnded() && !mine.WaitEnd(stop_fd));
  CHECK(!mine.Receive(&frame, &error, stop_fd) && Has(error, "nobody waits"));
  close(fds[1]);
  CHECK(!mine.WaitEnd(stop_fd));
  close(stop_fd);
  ControlConnection none;
  CHECK(!none.Connect("/no/such/socket", &error) && Has(error, "/no/such/socket") && none.HasEnded());
}

}  // namespace

int main(int argc, char** argv) {
  CHECK(argc == 2);
  const std::string name = argv[1];
  if (name == "arena") {
    ArenaAllocateAndMerge();
    ArenaGrowsToItsBudget();
    ArenaTrim();
    ArenaDropsWhatIsUnused();
  } else if (name == "segments") {
    SegmentsOfAPeer();
  } else if (name == "strings") {
    Strings();
  } else if (name == "settings") {
    SettingsText();
  } else if (name == "control") {
    ControlFrames();
  } else if (name == "sparse") {
    BeyondFourGiB();
  } else {
    CHECK(!"a known test");
  }
  return 0;
}
