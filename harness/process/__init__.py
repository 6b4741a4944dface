# SPDX-License-Identifier: Apache-2.0
"""Child processes: started in a group of their own, watched, timed out, and killed with all they started.

One engine lives in one process, so what a crashed or hung one leaves behind ends with its group.
"""
