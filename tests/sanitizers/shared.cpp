// What processes share memory by, among threads of one: rings with a writer and readers that wait for each other (ring.cpp,
// words.cpp), and sums and gathers (exchange.cpp). Its memory is on the heap, each part as long as it has to be, so that
// AddressSanitizer sees who leaves one. Everything that is read is checked.

#include <cstdio>
#include <memory>
#include <thread>
#include <vector>

#include "exchange.cpp"
#include "ring.cpp"
#include "words.cpp"

#ifndef MISSING_BYTES
#define MISSING_BYTES 0  // of the ring's content; see broken/ring_too_short.cpp
#endif

namespace {

void check(bool right, const char* what) {
  if (right) return;
  std::fprintf(stderr, "wrong: %s\n", what);
  std::abort();
}

// A ring whose counters begin anew after a few messages.
class SharedRing {
 public:
  SharedRing(int64_t num_readers, int64_t num_slots, int64_t slot_bytes)
      : words_(new char[kLine * (num_readers + 2)]()),
        labels_(new Label[num_slots]()),
        content_(new char[num_slots * slot_bytes - MISSING_BYTES]()) {
    char* tails = words_.get() + kLine;
    ring = {word(0), reinterpret_cast<std::atomic<int64_t>*>(tails + kLine * num_readers), tails, kLine, num_readers,
            labels_.get(), content_.get(), num_slots, slot_bytes};
    for (int64_t i = 0; i <= num_readers; ++i) *word(i) = (kMask - 10) << 1;
  }

  // Messages from 0 on, of which the last closes the ring.
  void write(uint64_t count, bool slowly) {
    std::vector<char> message(ring.slot_bytes);
    for (uint64_t number = 0; number < count; ++number) {
      const int64_t length = number % (ring.slot_bytes + 1);
      std::fill_n(message.begin(), length, static_cast<char>(number));
      while (!penstock_ring_put(&ring, number, message.data(), length)) wait_for_room();
      if (slowly) std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    penstock_word_close(ring.head, tail_of(ring, 0) + 1, ring.num_readers, ring.stride);
  }

  void read(int64_t reader, uint64_t count, bool early) {
    Rhythm rhythm{};
    std::vector<char> message(ring.slot_bytes);
    for (uint64_t number = 0;;) {
      const uint32_t head = penstock_word_load(ring.head), tail = penstock_word_load(tail_of(ring, reader));
      if (available(head, tail)) {
        const int64_t length = penstock_ring_take(&ring, reader, number, early ? &rhythm : nullptr, message.data());
        check(length == static_cast<int64_t>(number % (ring.slot_bytes + 1)), "a message has another length");
        for (int64_t i = 0; i < length; ++i) check(message[i] == static_cast<char>(number), "a message is another one");
        ++number;
      } else if (head & kClosed) {
        check(number == count, "messages are missing");
        return;
      } else if (penstock_ring_wait(&ring, reader, head, early ? &rhythm : nullptr, 0, 20'000, -1) == kSoon) {
        penstock_ring_wait(&ring, reader, head, &rhythm, 1, 20'000, -1);
      }
    }
  }

  Ring ring;

 private:
  static constexpr int64_t kLine = 128;

  Word* word(int64_t line) { return reinterpret_cast<Word*>(words_.get() + line * kLine); }

  void wait_for_room() {
    for (int64_t reader = 0; reader < ring.num_readers; ++reader) {
      Word* tail = tail_of(ring, reader);
      const uint32_t seen = penstock_word_load(tail);
      if (available(penstock_word_load(ring.head), seen) >= ring.num_slots) penstock_word_wait(tail, seen, ring.head + 1, 0, -1);
    }
  }

  std::unique_ptr<char[]> words_;
  std::unique_ptr<Label[]> labels_;
  std::unique_ptr<char[]> content_;
};

void hammer_rings(uint64_t count) {
  for (int64_t num_readers : {1, 3})
    for (int64_t num_slots : {1, 8})
      for (bool slowly : {false, true}) {
        SharedRing shared(num_readers, num_slots, 24);
        const uint64_t messages = slowly ? 40 : count;
        std::vector<std::thread> threads;
        for (int64_t reader = 0; reader < num_readers; ++reader)
          threads.emplace_back([&, reader] { shared.read(reader, messages, slowly); });
        shared.write(messages, slowly);
        for (std::thread& thread : threads) thread.join();
      }
}

// Numbers whose sums are exact in both kinds.
void exchange(char* memory, int64_t rank, int64_t size, int64_t piece, int rounds) {
  for (int round = 0; round < rounds; ++round) {
    const int64_t count = 1 + round * 7 % 50;
    std::vector<float> floats(count, static_cast<float>(rank + round % 8));
    penstock_all_reduce(memory, rank, size, piece, floats.data(), count, 0);
    const float sum = static_cast<float>(size * (size - 1) / 2 + size * (round % 8));
    for (float x : floats) check(x == sum, "a sum of floats");
    std::vector<uint16_t> halves(count, to_bfloat16(static_cast<float>(rank + round % 8)));
    penstock_all_reduce(memory, rank, size, piece, halves.data(), count, 1);
    for (uint16_t x : halves) check(from_bfloat16(x) == sum, "a sum of bfloat16");
    std::vector<char> own(count, static_cast<char>(rank * 16 + round % 16)), all(size * count);
    penstock_all_gather(memory, rank, size, piece, own.data(), all.data(), count);
    for (int64_t of = 0; of < size; ++of)
      for (int64_t i = 0; i < count; ++i)
        check(all[of * count + i] == static_cast<char>(of * 16 + round % 16), "what was gathered");
  }
}

void hammer_exchange(int rounds) {
  constexpr int64_t kPiece = 64;
  for (int64_t size : {2, 3}) {
    const std::unique_ptr<char[]> memory(new char[size * (128 + 2 * kPiece)]());
    std::vector<std::thread> threads;
    for (int64_t rank = 0; rank < size; ++rank)
      threads.emplace_back([&, rank] { exchange(memory.get(), rank, size, kPiece, rounds); });
    for (std::thread& thread : threads) thread.join();
  }
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 100;
  hammer_rings(static_cast<uint64_t>(rounds) * 10);
  hammer_exchange(rounds);
  std::puts("every message and every sum was what it should be");
}
