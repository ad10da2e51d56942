//! Row operations on the CPU.

use std::sync::Arc;

use crate::histories::contents;
use kvpool::base::{DType, Dims, ErrorKind};
use kvpool::index::Move;
use kvpool::kernels::{RowBuffer, gather_rows, move_rows, set_num_threads, zero_rows};
use kvpool::memory::{Host, Region};

fn buffer(rows: usize, heads: usize, dim: usize, dtype: DType) -> RowBuffer {
    let region = Arc::new(Region::new(Arc::new(Host), rows * heads * dim * dtype.size()).expect("memory"));
    RowBuffer::new(region, 0, [rows, heads, dim], dtype).expect("inside")
}

fn content(buffer: &RowBuffer) -> Vec<u8> {
    let mut copy = vec![0; buffer.bytes()];
    let source = buffer.region().address().as_ptr();
    // SAFETY: the buffer fills a live region, and the vector is ours.
    unsafe { copy.as_mut_ptr().copy_from_nonoverlapping(source, buffer.bytes()) };
    copy
}

fn dims(values: &[usize]) -> Dims {
    Dims::new(&values.iter().map(|&n| i64::try_from(n).expect("small")).collect::<Vec<_>>()).expect("few")
}

#[test]
fn threads_zero_the_rows_that_are_named() {
    let [target, expected] = [(); 2].map(|()| buffer(4096, 8, 64, DType::F32));
    for buffer in [&target, &expected] {
        contents::fill(buffer.region(), 0, buffer.bytes(), 7);
    }
    let rows: Vec<u32> = (0..4096).step_by(3).collect();
    set_num_threads(4);
    zero_rows(std::slice::from_ref(&target), &rows).expect("zeroed");
    set_num_threads(0);
    let row_bytes = target.bytes() / 4096;
    for row in rows {
        contents::fill(expected.region(), row as usize * row_bytes, row_bytes, 0);
    }
    assert!(content(&target) == content(&expected));
}

#[test]
fn rows_outside_are_refused_before_anything_happens() {
    let buffers = [buffer(8, 1, 4, DType::U8), buffer(4, 1, 4, DType::U8)];
    assert_eq!(zero_rows(&buffers, &[0, 5]).expect_err("outside").kind(), ErrorKind::Index);
    let step = Move::Copy { dst: 0, src: 5 };
    assert_eq!(move_rows(&buffers, &[step]).expect_err("outside").kind(), ErrorKind::Index);
    let out = buffer(2, 1, 4, DType::U8);
    let borrow = |dtype, shape: &[usize], strides: &[usize]| {
        out.region().borrow(0, dtype, dims(shape), dims(strides)).expect("inside")
    };
    let gather = |out, rows: &[u32]| gather_rows(&[(&buffers[1], out)], rows).map_err(|error| error.kind());
    assert_eq!(gather(borrow(DType::U8, &[2, 1, 4], &[4, 4, 1]), &[0, 4]), Err(ErrorKind::Index));
    assert_eq!(gather(borrow(DType::U8, &[1, 1, 4], &[4, 4, 1]), &[0, 1]), Err(ErrorKind::Config));
    assert_eq!(gather(borrow(DType::U8, &[2, 1, 4], &[1, 1, 2]), &[0, 1]), Err(ErrorKind::Config));
    assert_eq!(gather(borrow(DType::I8, &[2, 1, 4], &[4, 4, 1]), &[0, 1]), Err(ErrorKind::Type));
    assert_eq!(gather(borrow(DType::U8, &[2, 1, 4], &[4, 4, 1]), &[0, 1]), Ok(()));
}
