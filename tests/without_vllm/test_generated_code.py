# SPDX-License-Identifier: Apache-2.0
"""Generated kernels are read for loads of what they stored."""

from harness import generated_code

# In the form in which Inductor writes a module: kernels as quoted sources, calls after them.
MODULE = """
triton_poi_fused_add_0 = async_compile.triton('triton_poi_fused_add_0', '''
import triton
@triton.jit
def triton_poi_fused_add_0(in_out_ptr0, in_ptr0, xnumel, XBLOCK : tl.constexpr):
    tmp0 = tl.load(in_out_ptr0 + (x0), xmask)
    tmp1 = tl.load(in_ptr0 + (x0), xmask)
    tl.store(in_out_ptr0 + (x0), tmp0 + tmp1, xmask)
''', device_str='cuda')

triton_red_fused_norm_1 = async_compile.triton('triton_red_fused_norm_1', '''
@triton.jit
def triton_red_fused_norm_1(in_ptr0, out_ptr0, out_ptr1, xnumel, R0_BLOCK : tl.constexpr):
    for r0_offset in tl.range(0, 256, R0_BLOCK):
        tmp0 = tl.load(in_ptr0 + (r0_1 + 256*x0), xmask)
        tl.store(out_ptr0 + (r0_1 + 256*x0), tmp0, xmask)
    for r0_offset in tl.range(0, 256, R0_BLOCK):
        tmp9 = tl.load(out_ptr0 + (r0_1 + 256*x0), xmask)
        tl.store(out_ptr1 + (r0_1 + 256*x0), tmp9, xmask)
''', device_str='cuda')

def call(args):
    triton_poi_fused_add_0.run(buf0, arg0, 256)
"""


def test_a_kernel_that_loads_what_it_stored_is_found():
    found = {name: generated_code.reloaded(body) for name, body in generated_code.kernels(MODULE)}
    assert found == {"triton_poi_fused_add_0": [], "triton_red_fused_norm_1": ["out_ptr0"]}


def test_block_pointers_and_atomics_count_too():
    body = """
    tl.atomic_add(out_ptr0 + (x0), tmp0, xmask)
    tl.store(tl.make_block_ptr(out_ptr1, shape=[8]), tmp0)
    tmp1 = tl.load(
        tl.make_block_ptr(out_ptr1, shape=[8]))
    tmp2 = tl.load(out_ptr0 + (x0))
    """
    assert generated_code.reloaded(body) == ["out_ptr1", "out_ptr0"]


def test_code_without_kernels_has_none():
    assert list(generated_code.kernels("def call(args):\n    return args\n")) == []
