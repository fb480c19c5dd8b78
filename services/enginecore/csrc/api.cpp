// C interface of the library with the kernels. Functions return 0 or an errno value. Only one thread at a time may use a handle.

#include <cerrno>
#include <cstdint>
#include <new>

#include "chain.h"
#include "decoder.h"
#include "encoder.h"
#include "operators.h"

namespace {

struct Context {
  explicit Context(int threads) : pool(threads), operators(pool) {}
  ~Context() { pool.quiet(); }
  penstock::Pool pool;
  penstock::Operators operators;
};

template <class Body>
int guarded(const Body& body) {
  try {
    body();
    return 0;
  } catch (const std::bad_alloc&) {
    return ENOMEM;
  } catch (...) {
    return EAGAIN;  // the operating system could not start a thread
  }
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

int penstock_lanes() { return penstock::kLanes; }

// Returns the number to whose next multiple the inputs of a panel are padded, for weights of the dtype `kind`.
int64_t penstock_filled_to(int64_t kind) {
  using namespace penstock;
  return kind == kInt8 ? kFilledTo<int8_t> : kind == kBfloat16 || kind == kHalved ? kFilledTo<uint16_t> : kFilledTo<float>;
}

// Returns the number of bfloat16 parts into which each input is split (see parts.h). `rounded` says whether inputs may be rounded
// to bfloat16. The result is 0 if the processor has no unit for bfloat16.
int64_t penstock_parts(int64_t rounded) { return rounded ? penstock::kRoundedParts : penstock::kFloatParts; }

// Writes the sizes of the structs that are also defined in Python to `sizes`, so that Python detects a library that was built from
// other sources.
void penstock_sizes(int64_t* sizes) {
  using namespace penstock;
  for (size_t size : {sizeof(Linear), sizeof(Cache), sizeof(Params), sizeof(Layer), sizeof(Model), sizeof(Group), sizeof(Step),
                      sizeof(Attention), sizeof(Write), sizeof(Sampling), sizeof(Mask), sizeof(Grouped), sizeof(Mixture), sizeof(Rotary),
                      sizeof(Route), sizeof(Chain), sizeof(Fusion), sizeof(Update), sizeof(Segment), sizeof(StateMemory),
                      sizeof(StateSequence), sizeof(StateWrite), sizeof(StateStep), sizeof(Convolution), sizeof(Scan),
                      sizeof(EncoderLayer), sizeof(EncoderModel), sizeof(EncoderStep)})
    *sizes++ = static_cast<int64_t>(size);
}

int penstock_context_new(int threads, void** context) {
  return guarded([&] { *context = new Context(threads); });
}

void penstock_context_free(void* context) { delete static_cast<Context*>(context); }

// Packs the float weight `weight` [n, k] into the memory of `to`.
int penstock_pack(void* context, const float* weight, const penstock::Linear* to) {
  return guarded([&] { static_cast<Context*>(context)->operators.pack(weight, *to); });
}

// Writes the rows `rows` [count] of a packed weight to `to` [count, k].
int penstock_unpack(void* context, const penstock::Linear* from, const int64_t* rows, int64_t count, float* to) {
  return guarded([&] { static_cast<Context*>(context)->operators.unpack(*from, rows, count, to); });
}

int penstock_linear(void* context, const penstock::Linear* linear, const float* x, int64_t rows, int64_t stride, float* out,
                    int64_t out_stride) {
  return guarded([&] { static_cast<Context*>(context)->operators.linear(*linear, x, rows, stride, out, out_stride); });
}

// Adds the LoRA adapters' outputs for the rows of `x` to `out` [rows, n]. In each segment, the first update is the update of this
// product.
int penstock_low_rank(void* context, const penstock::Segment* segments, int64_t num_segments, int64_t n, const float* x, int64_t stride,
                      float* out, int64_t out_stride) {
  return guarded([&] { static_cast<Context*>(context)->operators.low_rank(segments, num_segments, n, x, stride, out, out_stride); });
}

int penstock_grouped(void* context, const penstock::Grouped* grouped) {
  return guarded([&] { static_cast<Context*>(context)->operators.grouped(*grouped); });
}

int penstock_route(void* context, const penstock::Route* route) {
  return guarded([&] { static_cast<Context*>(context)->operators.route(*route); });
}

int penstock_attend(void* context, const penstock::Attention* attention) {
  return guarded([&] { static_cast<Context*>(context)->operators.attend(*attention); });
}

// Computes attention over a cache of latents (see latent.h): `value_size` elements of a row are the value.
int penstock_attend_latents(void* context, const penstock::Attention* attention) {
  return guarded([&] { static_cast<Context*>(context)->operators.attend_latents(*attention); });
}

int penstock_write(void* context, const penstock::Write* write) {
  return guarded([&] { static_cast<Context*>(context)->operators.write(*write); });
}

int penstock_convolve(void* context, const penstock::StateStep* step, const penstock::Convolution* convolution) {
  return guarded([&] { static_cast<Context*>(context)->operators.convolve(*step, *convolution); });
}

int penstock_scan(void* context, const penstock::StateStep* step, const penstock::Scan* scan) {
  return guarded([&] { static_cast<Context*>(context)->operators.scan(*step, *scan); });
}

int penstock_mask(void* context, const penstock::Mask* mask) {
  return guarded([&] { static_cast<Context*>(context)->operators.mask(*mask); });
}

int penstock_sample(void* context, const penstock::Sampling* sampling) {
  return guarded([&] { static_cast<Context*>(context)->operators.sample(*sampling); });
}

int penstock_decoder_new(void* context, const penstock::Model* model, void** decoder) {
  return guarded([&] { *decoder = new penstock::ChainingDecoder(*model, static_cast<Context*>(context)->pool); });
}

void penstock_decoder_free(void* decoder) { delete static_cast<penstock::ChainingDecoder*>(decoder); }

int penstock_decoder_forward(void* decoder, const penstock::Step* step) {
  return guarded([&] { static_cast<penstock::ChainingDecoder*>(decoder)->forward(*step); });
}

// Computes a chain of steps (see Chain). `step` is as in `penstock_decoder_forward`, but must compute all layers in one call, with
// `keep_states` 0.
int penstock_decoder_chain(void* decoder, const penstock::Step* step, const penstock::Chain* chain) {
  return guarded([&] { static_cast<penstock::ChainingDecoder*>(decoder)->chain(*step, *chain); });
}

// Computes only the last norm and the head. `segments` are the segments of all tokens, as in a step.
int penstock_decoder_head(void* decoder, const float* x, const int64_t* rows, int64_t num_rows, float* logits, int64_t num_segments,
                          const penstock::Segment* segments) {
  return guarded([&] { static_cast<penstock::ChainingDecoder*>(decoder)->head(x, rows, num_rows, logits, num_segments, segments); });
}

int penstock_encoder_new(void* context, const penstock::EncoderModel* model, void** encoder) {
  return guarded([&] { *encoder = new penstock::Encoder(*model, static_cast<Context*>(context)->pool); });
}

void penstock_encoder_free(void* encoder) { delete static_cast<penstock::Encoder*>(encoder); }

int penstock_encoder_forward(void* encoder, const penstock::EncoderStep* step) {
  return guarded([&] { static_cast<penstock::Encoder*>(encoder)->forward(*step); });
}

}  // extern "C"
#pragma GCC visibility pop
