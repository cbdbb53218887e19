// conv_norm_pool_gelu, portable path: the input in shared memory.
//
// page[plane][chunk of channels][row][residue of the pixel modulo w_step][slot] of records. Eight neighbouring columns are 256 adjacent
// bytes at every tap and stride, so that the loads of a fragment touch each bank once; a tap is another start address, never a copy.
// Pixels outside the input are zeros; rows and planes outside are left out, since no warp visits them.
#pragma once

#include "conv_norm_pool_gelu_operand.cuh"
#include "conv_norm_pool_gelu_plan.cuh"

namespace fxfuse::conv_norm_pool_gelu {

// What turns a flat record index of a page into its coordinates.
struct StageIndex {
  FastDiv line, rows, chunks, slots;
};

inline StageIndex make_stage_index(const Problem& p, const PortablePlan& plan) {
  return {FastDiv(p.w_step() * plan.line_slots), FastDiv(plan.page_rows), FastDiv(plan.page_chunks), FastDiv(plan.line_slots)};
}

template <Operand operand>
__device__ __forceinline__ void load_record(const DataOf<operand>* from, int64_t channel_stride, int num_channels,
                                            uint32_t (&words)[kRecordWords]) {
  using T = DataOf<operand>;
  constexpr int kPerWord = 4 / sizeof(T);
#pragma unroll
  for (int i = 0; i < kRecordWords; ++i) {
    T value[2] = {from_float<T>(0.f), from_float<T>(0.f)};
#pragma unroll
    for (int j = 0; j < kPerWord; ++j) {
      if (i * kPerWord + j < num_channels) value[j] = from[(i * kPerWord + j) * channel_stride];
    }
    words[i] = operand_word<operand>(value[0], value[1]);
  }
}

template <Operand operand>
__device__ __forceinline__ void load_whole_record(const DataOf<operand>* from, uint32_t (&words)[kRecordWords]) {
  const uint4 low = reinterpret_cast<const uint4*>(from)[0], high = reinterpret_cast<const uint4*>(from)[1];
  const uint32_t raw[kRecordWords] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
  for (int i = 0; i < kRecordWords; ++i) {
    if constexpr (sizeof(DataOf<operand>) == 4) words[i] = fp32_word<operand>(__uint_as_float(raw[i]));
    else words[i] = raw[i];
  }
}

// Pages of `num_planes` planes from `first_plane` on, rows from `first_row` on, chunks from `first_chunk` on, of sample n.
template <Operand operand>
__device__ __forceinline__ void stage_pages(const Problem& p, const PortablePlan& plan, const StageIndex& index, char* pages, int64_t n,
                                            int first_plane, int num_planes, int first_row, int first_chunk) {
  using T = DataOf<operand>;
  const T* sample = static_cast<const T*>(p.input) + n * p.input_stride[0];
  const int num_records = num_planes * plan.page_chunks * plan.page_rows * p.w_step() * plan.line_slots;
#pragma unroll 2
  for (int i = threadIdx.x; i < num_records; i += blockDim.x) {
    uint32_t in_line, row, chunk, slot;
    const uint32_t line = index.line.divide(i, in_line), group = index.rows.divide(line, row);
    const int plane = first_plane + static_cast<int>(index.chunks.divide(group, chunk));
    const uint32_t residue = index.slots.divide(in_line, slot);
    const int d = plane, h = first_row + static_cast<int>(row), w = p.w_step() * (static_cast<int>(slot) + plan.first_slot) + residue;
    const int channel = (first_chunk + chunk) * kRecordChannels<operand>;
    if (static_cast<unsigned>(d) >= p.d.input || static_cast<unsigned>(h) >= p.h.input || channel >= p.in_channels) continue;
    uint32_t words[kRecordWords] = {};
    if (static_cast<unsigned>(w) < p.w.input) {
      const T* from = sample + channel * p.input_stride[1] + d * p.input_stride[2] + h * p.input_stride[3] + w * p.input_stride[4];
      if (p.reads_records) load_whole_record<operand>(from, words);
      else load_record<operand>(from, p.input_stride[1], p.in_channels - channel, words);
    }
    uint4* to = reinterpret_cast<uint4*>(pages + static_cast<size_t>(i) * kRecordBytes);
    to[0] = make_uint4(words[0], words[1], words[2], words[3]);
    to[1] = make_uint4(words[4], words[5], words[6], words[7]);
  }
}

}  // namespace fxfuse::conv_norm_pool_gelu
