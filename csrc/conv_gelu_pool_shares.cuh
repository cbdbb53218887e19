// conv_gelu_pool: how the blocks of a launch share its images, and where their sums go. Pure functions.
#pragma once

#include <cstdint>

namespace fxfuse::conv_gelu_pool {

// The images' steps in a row, `steps` of each, cut into `blocks` shares (1 to images * steps) of `least` or, the first `longer` ones, one
// more. A share may end in the middle of an image: so any number of blocks fills the card. Each image's sum comes in as many pieces as
// blocks touch it.
struct Shares {
  int images, steps, blocks, least, longer;

  Shares(int images, int steps, int blocks)  // images * steps is below 2^31
      : images(images), steps(steps), blocks(blocks), least(images * steps / blocks), longer(images * steps % blocks) {}

  __host__ __device__ int first(int block) const { return block * least + (block < longer ? block : longer); }
  __host__ __device__ int block_of(int step) const {
    const int in_longer = longer * (least + 1);
    return step < in_longer ? step / (least + 1) : longer + (step - in_longer) / least;
  }
  __host__ __device__ int first_block(int image) const { return block_of(image * steps); }
  __host__ __device__ int pieces(int image) const { return block_of((image + 1) * steps - 1) - first_block(image) + 1; }
  // Of any image, at most: it begins with the last step of a share, and short ones follow.
  __host__ __device__ int most_pieces() const { return 1 + (steps + least - 2) / least; }
};

}  // namespace fxfuse::conv_gelu_pool
