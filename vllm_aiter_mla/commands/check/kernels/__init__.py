# SPDX-License-Identifier: Apache-2.0
"""The step ``kernels``: capture graphs, replay them as serving does, and compare the results with the reference.

``step`` decides how the step ends. ``child`` runs one back end in a process of its own, because AITER's checks end a
process by an abort. ``printout`` prints the record.
"""
