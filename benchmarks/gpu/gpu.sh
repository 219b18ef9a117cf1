#!/bin/sh
# Everything that needs a GPU, on a machine that has torch and nothing else of ours: no make, no network.
#     sh benchmarks/gpu/gpu.sh --out DIRECTORY
# What isn't installed there travels along in .wheels (`make gpu-wheels`, beforehand, where there is a network).
cd "$(dirname "$0")/../.." && exec "${PYTHON:-python3}" -m benchmarks.gpu "$@"
