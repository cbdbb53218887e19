// An allocator for tests: every tensor lies between two bands of a known pattern, looked at when it is freed, and starts as nan.
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

namespace {

constexpr size_t kBand = 4096;  // keeps the alignment of cudaMalloc
constexpr int kBandByte = 0xA5, kNanByte = 0xFF;  // of all float dtypes, bytes of 0xFF are nan

int64_t allocations = 0, violations = 0;

void must(cudaError_t status) {
  if (status == cudaSuccess) return;
  std::fprintf(stderr, "guards: %s\n", cudaGetErrorString(status));
  std::abort();
}

bool is_intact(const char* band) {
  std::vector<unsigned char> bytes(kBand);
  must(cudaMemcpy(bytes.data(), band, kBand, cudaMemcpyDeviceToHost));
  for (const unsigned char byte : bytes) {
    if (byte != kBandByte) return false;
  }
  return true;
}

}  // namespace

extern "C" {

void* guarded_malloc(ssize_t size, int device, cudaStream_t) {
  char* base;
  must(cudaSetDevice(device));
  must(cudaMalloc(reinterpret_cast<void**>(&base), size + 2 * kBand));
  must(cudaMemset(base, kBandByte, size + 2 * kBand));
  must(cudaMemset(base + kBand, kNanByte, size));
  must(cudaDeviceSynchronize());
  ++allocations;
  return base + kBand;
}

void guarded_free(void* pointer, ssize_t size, int device, cudaStream_t) {
  char* const base = static_cast<char*>(pointer) - kBand;
  must(cudaSetDevice(device));
  must(cudaDeviceSynchronize());
  if (!is_intact(base) || !is_intact(base + kBand + size)) ++violations;
  must(cudaFree(base));
}

// What the bands are there to see: a write just past a tensor of `size` bytes.
void guarded_overrun(void* pointer, ssize_t size) { must(cudaMemset(static_cast<char*>(pointer) + size, 0, 1)); }

int64_t guarded_allocations() { return allocations; }
int64_t guarded_violations() { return violations; }
}
