//! The same operations on a GPU: parameters for the kernels of `plan.cu`, `rows.cu` and `table.cu`, one launch a
//! call.
//!
//! The structures are those of `params.cuh`. Everything that can be checked on the host is checked before a launch;
//! indices that only the device knows are checked there, and what is wrong with them is told by [`Launcher::fault`].

mod fetch;
mod images;
mod params;
mod plan;

pub use fetch::{Fetch, Fetcher, read_now};
pub use plan::{PlanBatch, PlanFields, PlanRequest};

use std::collections::HashSet;
use std::ffi::c_void;
use std::ptr;
use std::sync::{Arc, Mutex, PoisonError};

use crate::base::{Device, Error, ErrorKind, Result, widen};
use crate::index::Move;
use crate::kernels::indices::{Indices, Numbers};
use crate::kernels::rows::{RowBuffer, check_moves, check_targets};
use crate::kernels::store::{Store, targets};
use crate::memory::{Backend, Borrowed, Function, Gpu, Held, Pinned, Region, Ring, Stream};

use params::{
    GatherParams, GatherPart, Groups, Index, KvIndicesParams, MoveParams, OrderParams, PointsParams,
    RaggedParams, StoreParams, StorePart, ZeroParams, blocks, independent, parts_grid, ragged_grid, signed,
};

/// The kernels, loaded on one device.
#[derive(Debug)]
struct Kernels {
    device: Device,
    plan: Function,
    store: Function,
    gather: Function,
    copy: Function,
    copy_in_order: Function,
    zero: Function,
    write_points: Function,
    write_ragged: Function,
    kv_indices: Function,
    read_indices: Function,
}

impl Kernels {
    /// Those of `gpu`, compiled at the first call.
    fn of(gpu: &Gpu) -> Result<Arc<Self>> {
        static LOADED: Mutex<Vec<Arc<Kernels>>> = Mutex::new(Vec::new());
        let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(kernels) = loaded.iter().find(|kernels| kernels.device == gpu.device()) {
            return Ok(Arc::clone(kernels));
        }
        let rows =
            [c"kvpool_store", c"kvpool_gather", c"kvpool_move", c"kvpool_move_in_order", c"kvpool_zero"];
        let table =
            [c"kvpool_write_points", c"kvpool_write_ragged", c"kvpool_kv_indices", c"kvpool_read_indices"];
        let plan = gpu.load(&images::PLAN.images(gpu), &[c"kvpool_plan"])?;
        let rows = gpu.load(&images::ROWS.images(gpu), &rows)?;
        let table = gpu.load(&images::TABLE.images(gpu), &table)?;
        let (
            &[plan],
            &[store, gather, copy, copy_in_order, zero],
            &[write_points, write_ragged, kv_indices, read_indices],
        ) = (&plan[..], &rows[..], &table[..])
        else {
            return Err(Error::new(
                ErrorKind::Driver,
                "the driver loaded fewer kernels than it was asked for",
            ));
        };
        let kernels = Arc::new(Self {
            device: gpu.device(),
            plan,
            store,
            gather,
            copy,
            copy_in_order,
            zero,
            write_points,
            write_ragged,
            kv_indices,
            read_indices,
        });
        loaded.push(Arc::clone(&kernels));
        Ok(kernels)
    }
}

/// The table of every request's slots, int32 `[rows, columns]` on the device.
#[derive(Clone, Copy, Debug)]
pub struct Table<'a> {
    region: &'a Region,
    rows: usize,
    columns: usize,
}

impl<'a> Table<'a> {
    /// The table that fills `region`.
    ///
    /// # Errors
    /// [`ErrorKind::Index`] when the region is smaller.
    pub fn new(region: &'a Region, rows: usize, columns: usize) -> Result<Self> {
        region.at(0, rows.saturating_mul(columns).saturating_mul(size_of::<i32>()))?;
        Ok(Self { region, rows, columns })
    }

    fn address(&self) -> *mut i32 {
        self.region.address().as_ptr().cast()
    }
}

/// Which rows are copied where.
#[derive(Clone, Copy, Debug)]
pub enum Copies<'a> {
    /// As the host has planned it.
    Planned(&'a [Move]),
    /// Row `source[i]` to row `target[i]`, for `count` of them, as they come.
    Unplanned {
        /// Rows that are written.
        target: Numbers<'a>,
        /// Rows that are read.
        source: Numbers<'a>,
        /// How many.
        count: usize,
    },
}

/// Where a kernel notes what is wrong with indices that only the device knows: `Fault` of `params.cuh`.
const FAULT_BYTES: usize = 16;

/// How a pool works on its device: the kernels, the way there for numbers of the host, and a note of faults.
#[derive(Debug)]
pub struct Launcher {
    gpu: Arc<Gpu>,
    kernels: Arc<Kernels>,
    ring: Ring,
    fault: Region,
}

impl Launcher {
    /// For a pool on `gpu` that passes up to `ring_bytes` of numbers from the host at once.
    ///
    /// # Errors
    /// [`ErrorKind::Driver`] when the kernels cannot be loaded, [`ErrorKind::OutOfMemory`] when there is no memory.
    pub fn new(gpu: &Arc<Gpu>, ring_bytes: usize) -> Result<Self> {
        let kernels = Kernels::of(gpu)?;
        let ring = Ring::new(gpu, ring_bytes)?;
        let pinned: Arc<dyn Backend> = Arc::new(Pinned::new(gpu));
        Ok(Self { gpu: Arc::clone(gpu), kernels, ring, fault: Region::new(pinned, FAULT_BYTES)? })
    }

    /// The device.
    #[must_use]
    pub const fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    /// What a kernel of an earlier call found wrong, if any did. Told once. Makes no driver call.
    ///
    /// # Errors
    /// [`ErrorKind::Index`] with the number, its position, and what it must be below: `nouns` and `limits` are those
    /// of rows and of columns.
    pub fn fault(&self, nouns: [&str; 2], limits: [usize; 2]) -> Result<()> {
        self.gpu.check_process()?;
        let [what, value] = self.fault.read::<i64>(0, 2)?[..] else { return Ok(()) };
        if what == 0 {
            return Ok(());
        }
        self.fault.write(0, &[0i64; 2])?;
        let (kind, position) = (what & 0xff, what >> 8);
        Err(match kind {
            1 | 2 => {
                let which = usize::from(kind == 2);
                Error::index(format!(
                    "{} {value} at position {position} is outside [0, {}); an earlier call was given it in a \
                     tensor on the device, and left it out",
                    nouns[which], limits[which]
                ))
            }
            _ => Error::config(format!(
                "value {value} at position {position} does not fit an int32 tensor; an earlier call was given it \
                 in a tensor on the device, and left it out"
            )),
        })
    }

    /// Where kernels note faults.
    fn fault_address(&self) -> *mut c_void {
        self.fault.address().as_ptr().cast()
    }

    /// Passes what is on the host to the device, then has `work` launch with everything there.
    fn with(
        &self,
        numbers: &[Numbers<'_>],
        stream: Stream,
        work: impl FnOnce(&[Index]) -> Result<()>,
    ) -> Result<()> {
        let lists: Vec<&[i32]> = numbers
            .iter()
            .filter_map(|numbers| if let Numbers::List(list) = numbers { Some(*list) } else { None })
            .collect();
        if lists.is_empty() {
            let indices =
                numbers.iter().map(|numbers| Index::new(numbers, ptr::null())).collect::<Result<Vec<_>>>()?;
            return work(&indices);
        }
        self.ring
            .upload(&lists, None, stream, |region, offsets| {
                let mut offsets = offsets.iter();
                let indices = numbers.iter().map(|numbers| match numbers {
                    Numbers::List(list) => {
                        let offset = offsets.next().copied().unwrap_or(0);
                        Index::new(numbers, region.at(offset, size_of_val(*list))?.as_ptr().cast())
                    }
                    _ => Index::new(numbers, ptr::null()),
                });
                work(&indices.collect::<Result<Vec<_>>>()?)
            })
            .map(|_| ())
    }

    /// As [`store_rows`](super::store_rows), for K and V in one launch. What a row holds that is named twice by indices
    /// that only the device knows is not defined: warps share a row and run in any order, so K may be of one value and V of
    /// the other, and either may be mixed of both.
    ///
    /// # Errors
    /// As there; an index beyond the rows that only the device knows is left out and told by [`Launcher::fault`].
    pub fn store_rows(&self, stores: &[Store<'_>; 2], indices: &Indices<'_>, stream: Stream) -> Result<()> {
        let count = indices.len();
        let parts = [StorePart::new(&stores[0], count)?, StorePart::new(&stores[1], count)?];
        let rows = stores.iter().map(|store| store.target.shape()[0]).min().unwrap_or(0);
        let list = match indices {
            Indices::Host(values) => last_of_each(targets(values, rows)?),
            Indices::Device { .. } => Vec::new(),
        };
        let (first_blocks, grid) = parts_grid([parts[0].split, parts[1].split], count)?;
        self.with(&[indices.numbers(&list)], stream, |index| {
            let params = StoreParams {
                indices: index[0],
                count: signed(count),
                rows: signed(rows),
                fault: self.fault_address(),
                first_blocks,
                parts,
            };
            self.launch(self.kernels.store, grid, &params, stream)
        })
    }

    /// As [`gather_rows`](super::gather_rows), for K and V in one launch.
    ///
    /// # Errors
    /// As there; the row of an index that only the device knows to be outside is zeroed, and
    /// [`Launcher::fault`] tells it.
    pub fn gather_rows(
        &self,
        pairs: &[(&RowBuffer, Borrowed<'_>); 2],
        indices: &Indices<'_>,
        stream: Stream,
    ) -> Result<()> {
        let count = indices.len();
        check_targets(pairs, count)?;
        let rows = pairs[0].0.shape()[0];
        let list = indices.list("slot", rows)?;
        let [k, v] = pairs;
        let parts = [GatherPart::new(k.0, &k.1)?, GatherPart::new(v.0, &v.1)?];
        let (first_blocks, grid) = parts_grid([parts[0].split, parts[1].split], count)?;
        self.with(&[indices.numbers(&list)], stream, |index| {
            let params = GatherParams {
                indices: index[0],
                count: signed(count),
                rows: signed(rows),
                fault: self.fault_address(),
                first_blocks,
                parts,
            };
            self.launch(self.kernels.gather, grid, &params, stream)
        })
    }

    /// Copies row `source[i]` to row `target[i]` in every buffer of both groups, in one launch.
    ///
    /// Indices of the host are carried out as if all rows were read before any is written. Of those that only the
    /// device knows, no row may be both read and written, or written twice: which value it has then is not defined.
    ///
    /// # Errors
    /// [`ErrorKind::Index`] for a row that is not there, [`ErrorKind::Config`] for more than cross at once; a row
    /// that only the device knows to be outside is told by [`Launcher::fault`].
    pub fn copy_rows(&self, groups: [&[RowBuffer]; 2], plan: Copies<'_>, stream: Stream) -> Result<()> {
        let rows = groups[0].first().map_or(0, |buffer| buffer.shape()[0]);
        let raw = Groups::new(groups)?;
        let (target, source, count) = match plan {
            Copies::Planned(moves) => {
                groups.into_iter().try_for_each(|buffers| check_moves(buffers, moves))?;
                let Some((target, source)) = independent(moves) else {
                    return self.copy_rows_in_order(raw, moves, stream);
                };
                let count = moves.len();
                return self.copy_listed(
                    raw,
                    [Numbers::List(&target), Numbers::List(&source)],
                    count,
                    rows,
                    stream,
                );
            }
            Copies::Unplanned { target, source, count } => (target, source, count),
        };
        self.copy_listed(raw, [target, source], count, rows, stream)
    }

    fn copy_listed(
        &self,
        groups: Groups,
        numbers: [Numbers<'_>; 2],
        count: usize,
        rows: usize,
        stream: Stream,
    ) -> Result<()> {
        let (groups, grid) = groups.for_rows(count)?;
        self.with(&numbers, stream, |index| {
            let params = MoveParams {
                target: index[0],
                source: index[1],
                count: signed(count),
                rows: signed(rows),
                fault: self.fault_address(),
                groups,
            };
            self.launch(self.kernels.copy, grid, &params, stream)
        })
    }

    fn copy_rows_in_order(&self, groups: Groups, moves: &[Move], stream: Stream) -> Result<()> {
        let steps: Vec<i32> = moves
            .iter()
            .flat_map(|step| match *step {
                Move::Copy { dst, src } => [0, dst.cast_signed(), src.cast_signed()],
                Move::Swap(a, b) => [1, a.cast_signed(), b.cast_signed()],
            })
            .collect();
        let (groups, grid) = groups.for_words()?;
        self.ring
            .upload(&[&steps], None, stream, |region, offsets| {
                let steps = region.at(offsets[0], size_of_val(&steps[..]))?.as_ptr().cast_const().cast();
                let params = OrderParams { steps, count: signed(moves.len()), groups };
                self.launch(self.kernels.copy_in_order, grid, &params, stream)
            })
            .map(|_| ())
    }

    /// Zeroes the rows that `indices` names in every buffer of both groups, in one launch.
    ///
    /// # Errors
    /// As [`Launcher::copy_rows`].
    pub fn zero_rows(
        &self,
        groups: [&[RowBuffer]; 2],
        indices: &Indices<'_>,
        noun: &str,
        stream: Stream,
    ) -> Result<()> {
        let rows = groups[0].first().map_or(0, |buffer| buffer.shape()[0]);
        let (list, count) = (indices.list(noun, rows)?, indices.len());
        let (groups, grid) = Groups::new(groups)?.for_rows(count)?;
        self.with(&[indices.numbers(&list)], stream, |index| {
            let params = ZeroParams {
                indices: index[0],
                count: signed(count),
                rows: signed(rows),
                fault: self.fault_address(),
                groups,
            };
            self.launch(self.kernels.zero, grid, &params, stream)
        })
    }

    /// Writes `value[i]` to `table[row[i], column[i]]`, for `count` places, in one launch. With an echo, what was
    /// written is also sent to it, as (row, column, value) in int32, row -1 where a place is not in the table.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] for more numbers of the host than cross at once; [`ErrorKind::Driver`] when the driver
    /// refuses, and with an echo while `stream` is captured. What only the device knows to be wrong is left out and told
    /// by [`Launcher::fault`].
    pub fn write_points(
        &self,
        table: &Table<'_>,
        [row, column, value]: [Numbers<'_>; 3],
        count: usize,
        echo: Option<&Ring>,
        stream: Stream,
    ) -> Result<Option<Held>> {
        let blocks = blocks(count)?;
        let write = |echo: *mut i32| {
            self.with(&[row, column, value], stream, |index| {
                let params = PointsParams {
                    table: table.address(),
                    rows: signed(table.rows),
                    columns: signed(table.columns),
                    row: index[0],
                    column: index[1],
                    value: index[2],
                    count: signed(count),
                    echo,
                    fault: self.fault_address(),
                };
                self.launch(self.kernels.write_points, [blocks, 1], &params, stream)
            })
        };
        let bytes = count.saturating_mul(3 * size_of::<i32>());
        let held = match echo {
            Some(ring) => {
                self.gpu.not_capturing(
                    stream,
                    "a write to the table of what only the device knows, of which the host is told,",
                )?;
                ring.receive(bytes, stream, |region, at| write(region.at(at, bytes)?.as_ptr().cast()))?
            }
            None => None,
        };
        if held.is_none() {
            write(ptr::null_mut())?;
        }
        Ok(held)
    }

    /// Zeroes the first `lens[i]` columns of row `rows[i]` of the table, in one launch.
    ///
    /// # Errors
    /// [`ErrorKind::Index`] for a place outside of the table, [`ErrorKind::Config`] for more than cross at once.
    pub fn zero_ragged(&self, table: &Table<'_>, rows: &[u32], lens: &[u32], stream: Stream) -> Result<()> {
        let Some(longest) = lens.iter().max().filter(|longest| **longest > 0) else { return Ok(()) };
        if rows.iter().any(|&row| widen(row) >= table.rows) || widen(*longest) > table.columns {
            return Err(Error::index(format!("rows up to {longest} long are not all in the table")));
        }
        let mut indptr = vec![0i32];
        let mut total = 0i32;
        for len in lens {
            // Only differences count, so it may wrap.
            total = total.wrapping_add(len.cast_signed());
            indptr.push(total);
        }
        let rows: Vec<i32> = rows.iter().map(|row| row.cast_signed()).collect();
        let grid = ragged_grid(widen(*longest), rows.len())?;
        self.ring
            .upload(&[&rows, &indptr], None, stream, |region, offsets| {
                let params = RaggedParams {
                    table: table.address(),
                    columns: signed(table.columns),
                    rows: region.at(offsets[0], size_of_val(&rows[..]))?.as_ptr().cast_const().cast(),
                    starts: ptr::null(),
                    indptr: region.at(offsets[1], size_of_val(&indptr[..]))?.as_ptr().cast_const().cast(),
                    values: ptr::null(),
                    count: signed(rows.len()),
                };
                self.launch(self.kernels.write_ragged, grid, &params, stream)
            })
            .map(|_| ())
    }

    /// As [`build_kv_indices`](super::build_kv_indices), in one launch.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] for more numbers of the host than cross at once; what only the device knows to be wrong
    /// is left out and told by [`Launcher::fault`].
    pub fn kv_indices(
        &self,
        table: &Table<'_>,
        [row, indptr]: [Numbers<'_>; 2],
        out: &Borrowed<'_>,
        count: usize,
        stream: Stream,
    ) -> Result<()> {
        let capacity = out.shape().numel();
        let grid = ragged_grid(table.columns.min(capacity), count)?;
        self.with(&[row, indptr], stream, |index| {
            let params = KvIndicesParams {
                table: table.address(),
                rows: signed(table.rows),
                columns: signed(table.columns),
                row: index[0],
                indptr: index[1],
                out: out.address().as_ptr().cast(),
                capacity: signed(capacity),
                count: signed(count),
                fault: self.fault_address(),
            };
            self.launch(self.kernels.kv_indices, grid, &params, stream)
        })
    }

    /// Launches a kernel on a grid of blocks, unless that is empty.
    fn launch<P>(&self, kernel: Function, grid: [u32; 2], params: &P, stream: Stream) -> Result<()> {
        if grid.contains(&0) {
            return Ok(());
        }
        // SAFETY: each caller pairs a kernel with its parameters. Addresses are those of live regions of this device
        // and of tensors that the caller of the pool keeps alive in the order of `stream`; what a kernel reaches from
        // them was checked by the caller or is checked by the kernel.
        unsafe { self.gpu.launch(kernel, grid, params, stream) }
    }
}

/// `rows` with -1 for each that is named again later, so that only the last of its values is stored.
fn last_of_each(mut rows: Vec<i32>) -> Vec<i32> {
    let mut seen = HashSet::with_capacity(rows.len());
    for row in rows.iter_mut().rev() {
        if !seen.insert(*row) {
            *row = -1;
        }
    }
    rows
}
