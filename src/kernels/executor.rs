//! Execution of a pool's operations: on the host under locks, or on a device in the order of a stream.
//!
//! Which of the two is used depends on the memory of an [`Executor`], and is decided at construction. Each
//! operation is then one call: it checks the devices of its arguments, reports a fault of an earlier call,
//! checks all bounds, and runs or is enqueued.

use std::ops::Range;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use crate::base::{Device, Error, Id, IndexVec, RequestRow, Result, try_with_capacity};
use crate::index::{RowExtent, plan_moves};
use crate::memory::{BorrowedTensor, Event, Gpu, Region, Stream};

use super::indices::{IndexSpace, IndexSpaces, Indices};
use super::launch::{Copies, IndexUse, Launcher};
use super::pages::{LoadWay, PageCopy, PagePair, PagePlan, Pieces, copy_pages};
use super::rows::{LayerRows, RowBuffer, gather_rows, move_rows, zero_rows};
use super::store::{StoreRows, store_rows};
use super::table::{Table, build_kv_indices, part, zero_columns};

/// Runs the operations of a pool on its memory. Threads may share it. [`Pieces`] has an example.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "one for each pool")]
pub enum Executor {
    /// Calls run on the calling thread, in host memory.
    Host(HostExecutor),
    /// Calls run as kernels, in device memory. The order of a stream takes the place of locks.
    Device(Launcher),
}

/// The locks and index spaces of a pool in host memory.
#[derive(Debug)]
pub struct HostExecutor {
    spaces: IndexSpaces,
    /// One per section of the memory, held during access, so that calls of several threads do not interleave.
    /// A call that needs several takes them in order.
    locks: Vec<RwLock<()>>,
}

impl HostExecutor {
    // The locks guard no value that a panic could leave half changed, so poisoning is ignored.
    fn lock_section(&self, section: usize) -> RwLockWriteGuard<'_, ()> {
        self.locks[section].write().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_section_shared(&self, section: usize) -> RwLockReadGuard<'_, ()> {
        self.locks[section].read().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_all_sections(&self) -> Result<Vec<RwLockWriteGuard<'_, ()>>> {
        let mut guards = try_with_capacity(self.locks.len())?;
        guards.extend((0..self.locks.len()).map(|section| self.lock_section(section)));
        Ok(guards)
    }

    fn rows(&self, indices: &Indices<'_>) -> Result<Vec<u32>> {
        self.spaces.rows.check(indices.host_values()?)
    }
}

impl Executor {
    /// Creates an executor for the memory `region`, in `sections` that calls lock one at a time. Its indices
    /// belong to `spaces`, one of rows and one of columns; up to `ring_bytes` of them are transferred to a
    /// device at once.
    ///
    /// # Errors
    /// [`ErrorKind::Driver`](crate::base::ErrorKind::Driver) when the kernels cannot be loaded,
    /// [`ErrorKind::OutOfMemory`](crate::base::ErrorKind::OutOfMemory) when the memory for indices cannot be
    /// allocated.
    pub fn new(region: &Region, sections: usize, spaces: IndexSpaces, ring_bytes: usize) -> Result<Self> {
        let (Some(gpu), Some(backend), Some(users)) = (region.gpu(), region.backend(), region.users()) else {
            let mut locks = try_with_capacity(sections)?;
            locks.resize_with(sections, RwLock::default);
            return Ok(Self::Host(HostExecutor { spaces, locks }));
        };
        Launcher::new(gpu, backend, users, spaces, ring_bytes).map(Self::Device)
    }

    /// Returns the device of the memory, or `None` on the host.
    #[must_use]
    pub(crate) const fn gpu(&self) -> Option<&Arc<Gpu>> {
        match self {
            Self::Host(_) => None,
            Self::Device(launcher) => Some(launcher.gpu()),
        }
    }

    /// Returns a point to wait for before a call that gets `numbers` numbers from the host: see
    /// [`Ring::backpressure_event`](crate::memory::Ring::backpressure_event).
    #[must_use]
    pub(crate) fn backpressure_event(&self, numbers: usize) -> Option<Arc<Event>> {
        match self {
            Self::Host(_) => None,
            Self::Device(launcher) => launcher.backpressure_event(numbers),
        }
    }

    /// Reports, once, invalid indices of an earlier call that only the device has. Makes no driver call.
    ///
    /// # Errors
    /// [`ErrorKind::Index`](crate::base::ErrorKind::Index) for an index outside of its space: it was skipped.
    /// [`ErrorKind::Argument`](crate::base::ErrorKind::Argument) for a value beyond int32.
    pub(crate) fn take_fault(&self) -> Result<()> {
        match self {
            Self::Host(_) => Ok(()),
            Self::Device(launcher) => launcher.take_fault(),
        }
    }

    /// Checks that this process can still use the device. Makes no driver call.
    ///
    /// # Errors
    /// Same as [`Gpu::check_process`].
    pub(crate) fn check_process(&self) -> Result<()> {
        self.gpu().map_or(Ok(()), |gpu| gpu.check_process())
    }

    /// Checks that `stream` is not being captured into a graph.
    ///
    /// # Errors
    /// Same as [`Gpu::check_not_capturing`].
    pub(crate) fn check_not_capturing(&self, stream: Stream, what: &str) -> Result<()> {
        self.gpu().map_or(Ok(()), |gpu| gpu.check_not_capturing(stream, what))
    }

    /// Waits for everything on `stream`. Does nothing on the host.
    ///
    /// # Errors
    /// Same as [`Gpu::synchronize`].
    pub(crate) fn synchronize(&self, stream: Stream) -> Result<()> {
        self.gpu().map_or(Ok(()), |gpu| gpu.synchronize(stream))
    }

    /// Checks that index tensors are on the executor's device or in host memory. Work that reads those of the device
    /// can be enqueued on `stream` until the guard is dropped.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`](crate::base::ErrorKind::Argument) with both devices.
    pub(crate) fn use_indices<'a, const N: usize>(
        &self,
        indices: [&'a Indices<'a>; N],
        stream: Stream,
    ) -> Result<Option<IndexUse<'a, N>>> {
        match self {
            Self::Host(_) => {
                indices.iter().try_for_each(|indices| indices.host_values().map(drop)).map(|()| None)
            }
            Self::Device(launcher) => launcher.use_indices(indices, stream).map(Some),
        }
    }

    /// Writes the values of `stores`, two for a layer, to the rows in `indices`; negative indices are
    /// skipped. Locks `section`.
    ///
    /// When a row occurs twice, its last value stays. On a device this holds for indices from the host only:
    /// a row that occurs twice in a device tensor has undefined contents.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`](crate::base::ErrorKind::Argument) for shapes or devices that do not fit,
    /// [`ErrorKind::Type`](crate::base::ErrorKind::Type) for dtypes that cannot be converted,
    /// [`ErrorKind::Index`](crate::base::ErrorKind::Index) for an index beyond the rows. Nothing is written
    /// then. Otherwise same as `Executor::take_fault`, which also reports an index of a device tensor
    /// beyond the rows; it is skipped.
    pub(crate) fn store_rows(
        &self,
        section: usize,
        stores: &[StoreRows<'_>; 2],
        indices: &Indices<'_>,
        stream: Stream,
    ) -> Result<()> {
        match self {
            Self::Host(host) => {
                let indices = indices.host_values()?;
                let _guard = host.lock_section(section);
                store_rows(stores, indices)
            }
            Self::Device(launcher) => {
                let _uses = launcher.begin([indices], stream)?;
                let answer = launcher.store_rows(stores, indices, stream);
                for store in stores {
                    store.values.record_stream(stream);
                }
                answer
            }
        }
    }

    /// Copies the rows in `indices` to `out`, contiguous `[indices.len(), heads, dim]` of the buffer's dtype
    /// and device, for each of two buffers of a layer. Locks `section` shared.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`](crate::base::ErrorKind::Argument) or
    /// [`ErrorKind::Type`](crate::base::ErrorKind::Type) when an `out` does not fit,
    /// [`ErrorKind::Index`](crate::base::ErrorKind::Index) for a row that does not exist; nothing is written
    /// then. Otherwise same as `Executor::take_fault`, which also reports an index of a device tensor
    /// beyond the rows; its row in `out` is zeroed.
    pub(crate) fn gather_rows(
        &self,
        section: usize,
        pairs: &[(&RowBuffer, BorrowedTensor<'_>); 2],
        indices: &Indices<'_>,
        stream: Stream,
    ) -> Result<()> {
        match self {
            Self::Host(host) => {
                let rows = host.rows(indices)?;
                let _guard = host.lock_section_shared(section);
                gather_rows(pairs, &rows)
            }
            Self::Device(launcher) => {
                let _uses = launcher.begin([indices], stream)?;
                let gathered = launcher.gather_rows(pairs, indices, stream);
                for (_, out) in pairs {
                    out.record_stream(stream);
                }
                gathered
            }
        }
    }

    /// Copies row `src[i]` to row `dst[i]` in every buffer, as if all were read before any is written. Locks
    /// all sections.
    ///
    /// With index tensors on a device, no row may be both read and written, or written twice: its contents
    /// would be undefined.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`] for different lengths, and for more indices than
    /// can be transferred to a device at once; [`ErrorKind::Index`] for rows
    /// that do not exist. Nothing is copied then. Otherwise same as `Executor::take_fault`.
    ///
    /// [`ErrorKind::Argument`]: crate::base::ErrorKind::Argument
    /// [`ErrorKind::Index`]: crate::base::ErrorKind::Index
    pub(crate) fn copy_rows(
        &self,
        rows: &LayerRows,
        dst: &Indices<'_>,
        src: &Indices<'_>,
        stream: Stream,
    ) -> Result<()> {
        let _uses = match self {
            Self::Host(_) => None,
            Self::Device(launcher) => Some(launcher.begin([dst, src], stream)?),
        };
        if dst.len() != src.len() {
            let (dst, src) = (dst.len(), src.len());
            let text = format!("{dst} destinations and {src} sources; the numbers must be equal");
            return Err(Error::argument(text));
        }
        let plan = |space: IndexSpace, dst: &IndexVec, src: &IndexVec| -> Result<_> {
            plan_moves(&space.check(dst)?, &space.check(src)?)
        };
        match (self, dst, src) {
            (Self::Host(host), dst, src) => {
                let moves = plan(host.spaces.rows, dst.host_values()?, src.host_values()?)?;
                let _guard = host.lock_all_sections()?;
                move_rows(rows.all(), &moves)
            }
            (Self::Device(launcher), Indices::Host(dst), Indices::Host(src)) => {
                let moves = plan(launcher.spaces().rows, dst, src)?;
                launcher.copy_rows(rows, Copies::Planned(&moves), stream)
            }
            (Self::Device(launcher), dst, src) => {
                let space = launcher.spaces().rows;
                let (targets, sources) = (dst.list(space)?, src.list(space)?);
                let (target, source) = (dst.numbers(&targets), src.numbers(&sources));
                let plan = Copies::Unplanned { target, source, count: dst.len() };
                launcher.copy_rows(rows, plan, stream)
            }
        }
    }

    /// Zeroes the rows in `indices` in every buffer. Locks all sections.
    ///
    /// # Errors
    /// [`ErrorKind::Index`](crate::base::ErrorKind::Index) for a row that does not exist; nothing is zeroed
    /// then. Otherwise same as `Executor::take_fault`, which also reports an index of a device tensor
    /// beyond the rows; it is skipped.
    pub(crate) fn zero_rows(&self, rows: &LayerRows, indices: &Indices<'_>, stream: Stream) -> Result<()> {
        match self {
            Self::Host(host) => {
                let numbers = host.rows(indices)?;
                let _guard = host.lock_all_sections()?;
                zero_rows(rows.all(), &numbers)
            }
            Self::Device(launcher) => {
                let _uses = launcher.begin([indices], stream)?;
                launcher.zero_rows(rows, indices, stream)
            }
        }
    }

    /// Fills runs of rows with a byte in every buffer. Locks the section of each layer.
    ///
    /// # Errors
    /// [`ErrorKind::Index`](crate::base::ErrorKind::Index) for rows that do not exist;
    /// [`ErrorKind::Driver`](crate::base::ErrorKind::Driver) when a driver call fails.
    pub fn fill_rows(
        &self,
        rows: &LayerRows,
        runs: &[Range<usize>],
        value: u8,
        stream: Stream,
    ) -> Result<()> {
        for layer in 0..rows.layers() {
            let _guard = match self {
                Self::Host(host) => Some(host.lock_section(layer)),
                Self::Device(_) => None,
            };
            for buffer in rows.layer(layer)? {
                for run in runs {
                    let bytes = buffer.bytes_of(run);
                    match self {
                        // SAFETY: the section of the layer is locked.
                        Self::Host(_) => unsafe { buffer.region().fill(bytes.start, bytes.len(), value) }?,
                        Self::Device(launcher) => {
                            let range = buffer.region().range(bytes.start, bytes.len())?;
                            launcher.gpu().fill(range, value, stream)?;
                        }
                    }
                }
            }
        }
        Ok(())
    }

    /// Copies the `layers` of whole pages of `rows` to their pieces, or back.
    ///
    /// On the host it copies on this thread alone and takes no lock, so that no other call waits for it. On a
    /// device it is one launch on `stream` for up to 486 pages, and never waits. With
    /// [`HostAccess::Copied`](super::HostAccess::Copied) it is a copy by the driver for each page and kind:
    /// if the memory is pageable, the call may wait for them, and for what `stream` did before. The caller
    /// keeps the pages and pieces from other use until the copies have run.
    ///
    /// # Errors
    /// [`ErrorKind::Index`](crate::base::ErrorKind::Index) for pages, pieces or layers that do not exist,
    /// [`ErrorKind::Argument`](crate::base::ErrorKind::Argument) for pieces of other rows and for a target that
    /// is named twice; [`ErrorKind::Driver`](crate::base::ErrorKind::Driver) while `stream` is being
    /// captured. Nothing is copied then. [`ErrorKind::Driver`](crate::base::ErrorKind::Driver) when a driver
    /// call fails: some pages may have been copied. Faults of earlier calls are left to
    /// `Executor::take_fault`.
    pub fn copy_pages<I: Id>(
        &self,
        rows: &LayerRows,
        pieces: &Pieces,
        direction: PageCopy,
        pairs: &[PagePair<I>],
        layers: Range<usize>,
        stream: Stream,
    ) -> Result<()> {
        let device = self.gpu().map_or(Device::Cpu, |gpu| gpu.device());
        let plan = pieces.plan(rows, device, direction, pairs, &layers, None)?;
        self.carry_out(&plan, pieces, stream)
    }

    /// Works like [`Self::copy_pages`] for layers of a load that [`Pieces::begin_load`] began.
    pub(crate) fn load_pages<I: Id>(
        &self,
        rows: &LayerRows,
        pieces: &Pieces,
        pairs: &[PagePair<I>],
        layers: &Range<usize>,
        way: &LoadWay,
        stream: Stream,
    ) -> Result<()> {
        let device = self.gpu().map_or(Device::Cpu, |gpu| gpu.device());
        let plan = pieces.plan(rows, device, PageCopy::In, pairs, layers, Some(way))?;
        self.carry_out(&plan, pieces, stream)
    }

    fn carry_out(&self, plan: &PagePlan<'_>, pieces: &Pieces, stream: Stream) -> Result<()> {
        match self {
            Self::Host(_) => {
                copy_pages(plan);
                Ok(())
            }
            Self::Device(launcher) => launcher.copy_pages(plan, pieces, stream),
        }
    }

    /// Zeroes the written columns of rows of a table.
    ///
    /// On a device the caller has checked that `stream` is not being captured.
    ///
    /// # Errors
    /// [`ErrorKind::Index`](crate::base::ErrorKind::Index) for columns outside of the table,
    /// [`ErrorKind::Argument`](crate::base::ErrorKind::Argument) for more rows than can be transferred to a
    /// device at once.
    pub(crate) fn zero_columns(
        &self,
        table: &Table<'_>,
        rows: &[RowExtent<RequestRow>],
        stream: Stream,
    ) -> Result<()> {
        match self {
            Self::Host(_) => zero_columns(table, rows),
            Self::Device(launcher) => launcher.zero_columns(table, rows, stream),
        }
    }

    /// Concatenates the first slots of each row of a table: row `rows[i]` fills `out[indptr[i]..indptr[i +
    /// 1]]`. `out` is contiguous int32 on the device of the table; `indptr` has one number more than `rows`.
    ///
    /// # Errors
    /// [`ErrorKind::Index`](crate::base::ErrorKind::Index) when a row is not in the table or a part not in
    /// `out`; nothing is written then. Otherwise same as `Executor::take_fault`, which also reports invalid
    /// numbers of device tensors; they are skipped.
    pub(crate) fn build_kv_indices(
        &self,
        table: &Table<'_>,
        rows: &Indices<'_>,
        indptr: &Indices<'_>,
        out: &BorrowedTensor<'_>,
        stream: Stream,
    ) -> Result<()> {
        match self {
            Self::Host(host) => {
                let ends = indptr.host_values()?.as_i64()?;
                build_kv_indices(table, &host.rows(rows)?, &ends, out)
            }
            Self::Device(launcher) => {
                let _uses = launcher.begin([rows, indptr], stream)?;
                let row_list = rows.list(launcher.spaces().rows)?;
                let end_list = match indptr {
                    Indices::Device { .. } => Vec::new(),
                    Indices::Host(ends) => {
                        for (position, pair) in ends.as_i64()?.windows(2).enumerate() {
                            part(position, pair[0], pair[1], table.columns(), out.shape().numel())?;
                        }
                        ends.as_i32()?.into_owned()
                    }
                };
                let numbers = [rows.numbers(&row_list), indptr.numbers(&end_list)];
                let built = launcher.kv_indices(table, numbers, out, rows.len(), stream);
                out.record_stream(stream);
                built
            }
        }
    }
}
