//! K and V storage: stores of values with any strides, moves as if all sources were read first, gathers.

use std::ptr::NonNull;
use std::sync::Arc;

use kvpool::base::{DType, Device, ErrorKind, contiguous_strides};
use kvpool::kernels::Indices;
use kvpool::memory::{BorrowedTensor, Host, Region};
use kvpool::pool::{KvConfig, KvLayout, KvPool, Scales};

use super::guarded::Guarded;
use super::{Refusal, STREAM, Source, Verdict, agree, bytes_of, dims, ensure, host, int, places};

struct Model {
    /// The bytes of keys and values, by layer and row.
    rows: Vec<[Vec<Vec<u8>>; 2]>,
    marks: u8,
}

pub(super) fn run(source: &mut Source<'_>) {
    let mut config = KvConfig {
        size: 1 + source.below(12),
        layer_num: 1 + source.below(2),
        k_head_num: 1 + source.below(3),
        k_head_dim: source.of(&[1, 2, 5, 33]),
        v_head_num: 1 + source.below(2),
        v_head_dim: source.of(&[1, 4, 16]),
        dtype: source.of(&[DType::F32, DType::BF16, DType::U8]),
        page_size: source.of(&[1, 2, 4]),
        layout: source.of(&[KvLayout::Split, KvLayout::Fused]),
        pin_memory: false,
    };
    if config.layout == KvLayout::Fused {
        (config.v_head_num, config.v_head_dim) = (config.k_head_num, config.k_head_dim);
    }
    let pool = KvPool::new(&config, &host()).expect("memory");
    let zeros = |layer: usize| {
        let buffers = pool.kv_buffer(layer).expect("a layer");
        buffers.map(|view| {
            let bytes = bytes_of(&view);
            bytes.chunks(bytes.len() / pool.rows()).map(<[u8]>::to_vec).collect::<Vec<_>>()
        })
    };
    let mut model = Model { rows: (0..config.layer_num).map(zeros).collect(), marks: 0 };
    while source.next_step() {
        match source.below(8) {
            0..=3 => store(source, &pool, &mut model),
            4 | 5 => move_rows(source, &pool, &mut model),
            _ => gather(source, &pool, &model),
        }
        check(&pool, &model);
    }
}

/// The layout of a caller's tensor, in elements.
struct Values {
    memory: Guarded,
    shape: Vec<usize>,
    strides: Vec<usize>,
}

impl Values {
    /// Usually `[..., heads, dim]` or `[..., heads * dim]` with `count` rows, and gaps between them.
    fn new(source: &mut Source<'_>, count: usize, [heads, dim]: [usize; 2], dtype: DType) -> Self {
        let count = if source.rarely(16) { count + 1 } else { count };
        let mut shape = match source.below(4) {
            0 if count.is_multiple_of(2) => vec![2, count / 2],
            1 => vec![1, count, 1],
            _ => vec![count],
        };
        match source.below(16) {
            0 => shape.push(dim),
            1 => shape.extend([dim, heads]),
            2..=7 => shape.push(heads * dim),
            _ => shape.extend([heads, dim]),
        }
        let mut strides = vec![0; shape.len()];
        let mut step = if source.rarely(8) { 2 } else { 1 };
        for axis in (0..shape.len()).rev() {
            strides[axis] = step;
            step = step * shape[axis].max(1) + if source.rarely(3) { source.below(4) } else { 0 };
        }
        if source.rarely(8) {
            strides[0] = 0;
        }
        let reach = shape.iter().zip(&strides).map(|(extent, stride)| extent.saturating_sub(1) * stride);
        let elements = if shape.contains(&0) { 0 } else { reach.sum::<usize>() + 1 };
        let memory = Guarded::new(elements * dtype.size(), true);
        Self { memory, shape, strides }
    }

    fn borrow(&self, dtype: DType) -> BorrowedTensor<'_> {
        let address = NonNull::new(self.memory.address()).expect("mapped");
        // SAFETY: `new` has made the memory long enough for the farthest element.
        unsafe { BorrowedTensor::new(address, dtype, Device::Cpu, dims(&self.shape), dims(&self.strides)) }
    }

    /// The bytes of its rows, if it has `count` of them.
    fn rows(&mut self, count: usize, [heads, dim]: [usize; 2], size: usize) -> Option<Vec<Vec<u8>>> {
        let n = self.shape.len();
        let tail = if n >= 2 && self.shape[n - 2..] == [heads, dim] {
            2
        } else if self.shape[n - 1] == heads * dim {
            1
        } else {
            return None;
        };
        if self.shape[..n - tail].iter().product::<usize>() != count {
            return None;
        }
        let (shape, strides) = (self.shape.clone(), self.strides.clone());
        let content = self.memory.content();
        let element = |mut at: usize| {
            let mut lying = 0;
            for axis in (0..n).rev() {
                lying += at % shape[axis] * strides[axis];
                at /= shape[axis];
            }
            &content[lying * size..(lying + 1) * size]
        };
        let width = heads * dim;
        Some(
            (0..count)
                .map(|row| (0..width).flat_map(|at| element(row * width + at)).copied().collect())
                .collect(),
        )
    }
}

fn shapes(pool: &KvPool) -> [[usize; 2]; 2] {
    let config = pool.config();
    [[config.k_head_num, config.k_head_dim], [config.v_head_num, config.v_head_dim]]
}

fn has_layer(pool: &KvPool, layer: usize) -> Verdict {
    ensure(layer < pool.config().layer_num, ErrorKind::Index)
}

fn store(source: &mut Source<'_>, pool: &KvPool, model: &mut Model) {
    let (dtype, rows) = (pool.config().dtype, pool.rows());
    let layer = source.below(pool.config().layer_num + 1);
    let indices = source.indices(6, rows);
    let mut given = shapes(pool).map(|shape| Values::new(source, indices.len(), shape, dtype));
    for given in &mut given {
        model.marks = model.marks.wrapping_add(17);
        for (byte, at) in given.memory.content().iter_mut().zip(0u8..=250) {
            *byte = at.wrapping_add(model.marks);
        }
        assert_eq!(given.memory.bytes(), given.memory.content().len());
    }
    let values = [given[0].borrow(dtype), given[1].borrow(dtype)];
    let scale = if source.rarely(16) { Some(2.0) } else { None };
    let scales = Scales { k: scale, v: None };
    let answer = pool.set_kv(layer, &Indices::Host(source.index_vec(&indices)), values, scales, STREAM);
    let beyond = indices.iter().find(|&&row| row >= int(rows));
    let [keys, values] = &mut given;
    let [of_keys, of_values] = shapes(pool);
    let read = [
        keys.rows(indices.len(), of_keys, dtype.size()),
        values.rows(indices.len(), of_values, dtype.size()),
    ];
    let expected = has_layer(pool, layer)
        .and_then(|()| ensure(scale.is_none() && read.iter().all(Option::is_some), ErrorKind::Argument))
        .and_then(|()| beyond.map_or(Ok(()), |&row| Err(Refusal::at(ErrorKind::Index, row))));
    if agree(answer, &expected).is_some() {
        for (target, read) in model.rows[layer].iter_mut().zip(read) {
            for (&row, bytes) in indices.iter().zip(read.unwrap_or_default()) {
                // A negative row is skipped.
                if let Ok(row) = usize::try_from(row) {
                    target[row] = bytes;
                }
            }
        }
    }
}

fn move_rows(source: &mut Source<'_>, pool: &KvPool, model: &mut Model) {
    let rows = pool.rows();
    let src = source.indices(10, rows);
    let dst: Vec<i64> = if source.rarely(12) {
        source.indices(10, rows)
    } else {
        src.iter().map(|_| source.index(rows)).collect()
    };
    let [to, from] = [&dst, &src].map(|given| Indices::Host(source.index_vec(given)));
    let known = ensure(dst.len() == src.len(), ErrorKind::Argument)
        .and_then(|()| Ok((places(&dst, rows)?, places(&src, rows)?)));
    agree(pool.move_kv(&to, &from, STREAM), &known);
    for buffer in model.rows.iter_mut().flatten() {
        let before = buffer.clone();
        for (dst, src) in known.iter().flat_map(|(dst, src)| dst.iter().zip(src)) {
            buffer[*dst].clone_from(&before[*src]);
        }
    }
}

fn gather(source: &mut Source<'_>, pool: &KvPool, model: &Model) {
    let (rows, layer) = (pool.rows(), source.below(pool.config().layer_num + 1));
    let indices = source.indices(6, rows);
    let given = Indices::Host(source.index_vec(&indices));
    let known = has_layer(pool, layer).and_then(|()| places(&indices, rows));
    let expected = known.map(|known| {
        let rows = &model.rows[layer];
        [0, 1].map(|which| known.iter().flat_map(|&row| &rows[which][row]).copied().collect::<Vec<u8>>())
    });
    let answer = agree(pool.gather_kv(layer, &given), &expected);
    assert_eq!(answer.map(|views| views.map(|view| bytes_of(&view))), expected.clone().ok());
    let (dtype, is_short) = (pool.config().dtype, source.rarely(8));
    let count = if is_short { indices.len() + 1 } else { indices.len() };
    let outs = shapes(pool).map(|[heads, dim]| {
        let region = Region::new(Arc::new(Host), count * heads * dim * dtype.size()).expect("memory");
        (region, dims(&[count, heads, dim]))
    });
    let [keys, values] = &outs;
    let out = [keys, values]
        .map(|(region, shape)| region.borrow(0, dtype, *shape, contiguous_strides(shape)).expect("inside"));
    let is_long_enough = ensure(!is_short, ErrorKind::Argument);
    let answer = pool.gather_kv_into(layer, &given, &out, STREAM);
    let is_right =
        agree(answer, &expected.as_ref().map_err(|refusal| *refusal).and(is_long_enough)).is_some();
    for (out, expected) in out.iter().zip(expected.into_iter().flatten()) {
        let mut found = vec![0; expected.len()];
        // SAFETY: the region has at least this many bytes, and no code writes to it now.
        unsafe { found.as_mut_ptr().copy_from_nonoverlapping(out.address().as_ptr(), found.len()) };
        assert!(if is_right { found == expected } else { found.iter().all(|&byte| byte == 0) });
    }
}

fn check(pool: &KvPool, model: &Model) {
    for (layer, rows) in model.rows.iter().enumerate() {
        let buffers = pool.kv_buffer(layer).expect("a layer");
        for (buffer, rows) in buffers.iter().zip(rows) {
            assert_eq!(bytes_of(buffer), rows.concat());
        }
    }
}
