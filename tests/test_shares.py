"""How blocks share a launch's images (csrc/conv_gelu_pool_shares.cuh): every step once, and no more pieces than there is room for."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from fxfuse.recipe import beside
from fxfuse.toolchain import find_cxx

pytestmark = pytest.mark.compiler

PROGRAM = r"""
#define __host__
#define __device__
#include "conv_gelu_pool_shares.cuh"
#include <cstdio>

using fxfuse::conv_gelu_pool::Shares;

bool is_right(const Shares& s) {
  if (s.first(0) != 0 || s.first(s.blocks) != s.images * s.steps) return false;
  for (int block = 0; block < s.blocks; ++block) {
    if (s.first(block + 1) <= s.first(block) || s.first(block + 1) - s.first(block) > s.least + 1) return false;
    for (int step = s.first(block); step < s.first(block + 1); ++step) {
      if (s.block_of(step) != block) return false;
    }
  }
  for (int image = 0; image < s.images; ++image) {
    const int first = s.block_of(image * s.steps), last = s.block_of((image + 1) * s.steps - 1);
    if (s.first_block(image) != first || s.pieces(image) != last - first + 1 || s.pieces(image) > s.most_pieces()) return false;
  }
  return true;
}

int main() {
  for (int images = 1; images <= 9; ++images) {
    for (int steps = 1; steps <= 40; ++steps) {
      for (int blocks = 1; blocks <= images * steps; ++blocks) {
        if (!is_right(Shares(images, steps, blocks))) return std::printf("images=%d steps=%d blocks=%d\n", images, steps, blocks), 1;
      }
    }
  }
  return 0;
}
"""


def test_every_step_once_and_room_for_every_piece(tmp_path: Path) -> None:
    source, program = tmp_path / "shares.cpp", tmp_path / "shares"
    source.write_text(PROGRAM)
    subprocess.run([find_cxx(os.environ).path, "-std=c++20", "-O1", "-I", str(beside("csrc")), str(source), "-o", str(program)], check=True)
    done = subprocess.run([str(program)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")
