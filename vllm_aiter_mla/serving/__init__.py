# SPDX-License-Identifier: Apache-2.0
"""What runs in a step: the ops, the layer that they call, the decision which kernel serves it, and the back ends."""
