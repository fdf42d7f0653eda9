# SPDX-License-Identifier: Apache-2.0
"""What happens once in a worker, after its weights are loaded: the kernels are first called, checked and timed."""
