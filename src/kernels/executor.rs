//! Where the operations of a pool run: on the host, under locks, or on a device, in the order of a stream.
//!
//! That is decided once, by the memory for which an [`Executor`] is made. Each operation is one call then: it checks
//! where its arguments are, what an earlier call left to tell, and that everything fits; then it runs, or is enqueued.

use std::ops::Range;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use crate::base::{Error, IndexVec, Result};
use crate::index::plan_moves;
use crate::memory::{Borrowed, Event, Gpu, Region, Stream};

use super::indices::{IndexSpace, Indices};
use super::launch::{Copies, Launcher};
use super::rows::{LayerRows, RowBuffer, gather_rows, move_rows, zero_rows};
use super::store::{Store, store_rows};
use super::table::{Table, build_kv_indices, part, zero_columns};

/// How a pool works on its memory.
///
/// ```
/// use std::sync::Arc;
/// use kvpool::base::{DType, IndexVec};
/// use kvpool::kernels::{Executor, IndexSpace, Indices, LayerLayout, LayerRows};
/// use kvpool::memory::{Host, Region, Stream};
/// let region = Arc::new(Region::new(Arc::new(Host), 2 * 4 * 16).unwrap());
/// let layout = |offset| LayerLayout { offset, step: 64, shape: [4, 1, 16], dtype: DType::U8 };
/// let rows = LayerRows::new(&region, 1, [layout(0), layout(64)]).unwrap();
/// let executor = Executor::new(&region, 1, [IndexSpace { noun: "row", len: 4 }; 2], 0).unwrap();
/// let all = Indices::Host(IndexVec::I32(vec![0, 1, 2, 3]));
/// executor.zero_rows(&rows, &all, Stream::DEFAULT).unwrap();
/// let none = Indices::Host(IndexVec::I32(vec![4]));
/// assert!(executor.zero_rows(&rows, &none, Stream::DEFAULT).is_err());
/// ```
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "one for each pool")]
pub enum Executor {
    /// By the calling thread, on host memory.
    Host(HostExecutor),
    /// By kernels, on the memory of a device. The order of a stream takes the place of locks.
    Device(Launcher),
}

/// What it takes to work on host memory.
#[derive(Debug)]
pub struct HostExecutor {
    spaces: [IndexSpace; 2],
    /// One for each section of the memory, held while it is read or written, so that calls of several threads do not
    /// mix. A call that needs several takes them in order.
    locks: Vec<RwLock<()>>,
}

impl HostExecutor {
    // The locks guard no value that a panic could leave half changed, so poison is ignored.
    fn write(&self, section: usize) -> RwLockWriteGuard<'_, ()> {
        self.locks[section].write().unwrap_or_else(PoisonError::into_inner)
    }

    fn read(&self, section: usize) -> RwLockReadGuard<'_, ()> {
        self.locks[section].read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write_all(&self) -> Vec<RwLockWriteGuard<'_, ()>> {
        (0..self.locks.len()).map(|section| self.write(section)).collect()
    }

    fn rows(&self, indices: &Indices<'_>) -> Result<Vec<u32>> {
        self.spaces[0].check(indices.on_host()?)
    }
}

impl Executor {
    /// For a pool whose memory is `region`, in `sections` that calls lock one by one. Its indices are of `spaces`, those of
    /// rows and those of columns; up to `ring_bytes` of them cross to a device at once.
    ///
    /// # Errors
    /// [`ErrorKind::Driver`](crate::base::ErrorKind::Driver) when the kernels cannot be loaded,
    /// [`ErrorKind::OutOfMemory`](crate::base::ErrorKind::OutOfMemory) when there is no memory for the indices.
    pub fn new(region: &Region, sections: usize, spaces: [IndexSpace; 2], ring_bytes: usize) -> Result<Self> {
        let (Some(gpu), Some(backend), Some(users)) = (region.gpu(), region.backend(), region.users()) else {
            let locks = (0..sections).map(|_| RwLock::new(())).collect();
            return Ok(Self::Host(HostExecutor { spaces, locks }));
        };
        Launcher::new(gpu, backend, users, spaces, ring_bytes).map(Self::Device)
    }

    /// The device on which it works, if it is not the host.
    #[must_use]
    pub const fn gpu(&self) -> Option<&Arc<Gpu>> {
        match self {
            Self::Host(_) => None,
            Self::Device(launcher) => Some(launcher.gpu()),
        }
    }

    /// A point to wait for before more numbers of the host are sent: see [`Ring::crowded`](crate::memory::Ring::crowded).
    #[must_use]
    pub fn crowded(&self) -> Option<Arc<Event>> {
        match self {
            Self::Host(_) => None,
            Self::Device(launcher) => launcher.crowded(),
        }
    }

    /// Reports what is wrong with indices that an earlier call was given on the device, once. Makes no driver call.
    ///
    /// # Errors
    /// [`ErrorKind::Index`](crate::base::ErrorKind::Index) for an index outside of its space: it was left out.
    /// [`ErrorKind::Config`](crate::base::ErrorKind::Config) for a value beyond int32.
    pub fn fault(&self) -> Result<()> {
        match self {
            Self::Host(_) => Ok(()),
            Self::Device(launcher) => launcher.fault(),
        }
    }

    /// Checks that the device can still be used by this process. Makes no driver call.
    ///
    /// # Errors
    /// As [`Gpu::check_process`].
    pub fn check_process(&self) -> Result<()> {
        self.gpu().map_or(Ok(()), |gpu| gpu.check_process())
    }

    /// Checks that `stream` is not being captured into a graph.
    ///
    /// # Errors
    /// As [`Gpu::not_capturing`].
    pub fn not_capturing(&self, stream: Stream, what: &str) -> Result<()> {
        self.gpu().map_or(Ok(()), |gpu| gpu.not_capturing(stream, what))
    }

    /// Waits for everything on `stream`; on the host there is nothing to wait for.
    ///
    /// # Errors
    /// As [`Gpu::synchronize`].
    pub fn synchronize(&self, stream: Stream) -> Result<()> {
        self.gpu().map_or(Ok(()), |gpu| gpu.synchronize(stream))
    }

    /// Checks that index tensors are where the executor works, or in host memory, and notes that work on `stream` reads
    /// those of the device.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](crate::base::ErrorKind::Config) with both devices.
    pub fn expect_here(&self, indices: &[&Indices<'_>], stream: Stream) -> Result<()> {
        match self {
            Self::Host(_) => indices.iter().try_for_each(|indices| indices.on_host().map(drop)),
            Self::Device(launcher) => launcher.expect_here(indices, stream),
        }
    }

    /// Writes the values of `stores`, which are two of a layer, to the rows that `indices` names; negative indices are
    /// skipped. Locks `section`.
    ///
    /// When a row is named twice, the last of its values stays. On a device that holds for indices of the host only: what
    /// a row holds that is named twice by indices that only the device knows is not defined.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](crate::base::ErrorKind::Config) for shapes or devices that do not fit,
    /// [`ErrorKind::Type`](crate::base::ErrorKind::Type) for dtypes that cannot be converted,
    /// [`ErrorKind::Index`](crate::base::ErrorKind::Index) for an index beyond the rows. Nothing is written then. As
    /// [`Executor::fault`]; an index beyond the rows that only the device knows is left out and reported there.
    pub fn store_rows(
        &self,
        section: usize,
        stores: &[Store<'_>; 2],
        indices: &Indices<'_>,
        stream: Stream,
    ) -> Result<()> {
        match self {
            Self::Host(host) => {
                let indices = indices.on_host()?;
                let _alone = host.write(section);
                store_rows(stores, indices)
            }
            Self::Device(launcher) => {
                launcher.begin(&[indices], stream)?;
                for store in stores {
                    store.values.used_on(stream);
                }
                launcher.store_rows(stores, indices, stream)
            }
        }
    }

    /// Copies the rows that `indices` names to `out`, contiguous `[indices.len(), heads, dim]` of the buffer's dtype and
    /// device, for each of two buffers of a layer. Shares `section`.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](crate::base::ErrorKind::Config) or [`ErrorKind::Type`](crate::base::ErrorKind::Type) when an
    /// `out` does not fit, [`ErrorKind::Index`](crate::base::ErrorKind::Index) for a row that is not there; nothing is
    /// written then. As [`Executor::fault`]; the row of an index that only the device knows to be outside is zeroed, and
    /// reported there.
    pub fn gather_rows(
        &self,
        section: usize,
        pairs: &[(&RowBuffer, Borrowed<'_>); 2],
        indices: &Indices<'_>,
        stream: Stream,
    ) -> Result<()> {
        match self {
            Self::Host(host) => {
                let rows = host.rows(indices)?;
                let _shared = host.read(section);
                gather_rows(pairs, &rows)
            }
            Self::Device(launcher) => {
                launcher.begin(&[indices], stream)?;
                for (_, out) in pairs {
                    out.used_on(stream);
                }
                launcher.gather_rows(pairs, indices, stream)
            }
        }
    }

    /// Copies row `src[i]` to row `dst[i]` in every buffer, as if all were read before any is written. Locks all sections.
    ///
    /// Of index tensors on a device no row may be both read and written, or written twice: what it holds then is not
    /// defined.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](crate::base::ErrorKind::Config) for different lengths, and for more than cross to a device at
    /// once; [`ErrorKind::Index`](crate::base::ErrorKind::Index) for rows that are not there. Nothing is copied then. As
    /// [`Executor::fault`].
    pub fn copy_rows(
        &self,
        rows: &LayerRows,
        dst: &Indices<'_>,
        src: &Indices<'_>,
        stream: Stream,
    ) -> Result<()> {
        if let Self::Device(launcher) = self {
            launcher.begin(&[dst, src], stream)?;
        }
        if dst.len() != src.len() {
            let (dst, src) = (dst.len(), src.len());
            let text = format!("{dst} destinations and {src} sources; there must be as many");
            return Err(Error::config(text));
        }
        let plan = |space: IndexSpace, dst: &IndexVec, src: &IndexVec| -> Result<_> {
            Ok(plan_moves(&space.check(dst)?, &space.check(src)?))
        };
        match (self, dst, src) {
            (Self::Host(host), dst, src) => {
                let moves = plan(host.spaces[0], dst.on_host()?, src.on_host()?)?;
                let _alone = host.write_all();
                move_rows(rows.all(), &moves)
            }
            (Self::Device(launcher), Indices::Host(dst), Indices::Host(src)) => {
                let moves = plan(launcher.spaces()[0], dst, src)?;
                launcher.copy_rows(rows.kinds(), Copies::Planned(&moves), stream)
            }
            (Self::Device(launcher), dst, src) => {
                let space = launcher.spaces()[0];
                let (targets, sources) = (dst.list(space)?, src.list(space)?);
                let (target, source) = (dst.numbers(&targets), src.numbers(&sources));
                let plan = Copies::Unplanned { target, source, count: dst.len() };
                launcher.copy_rows(rows.kinds(), plan, stream)
            }
        }
    }

    /// Zeroes the rows that `indices` names in every buffer. Locks all sections.
    ///
    /// # Errors
    /// [`ErrorKind::Index`](crate::base::ErrorKind::Index) for a row that is not there; nothing is zeroed then. As
    /// [`Executor::fault`]; an index that only the device knows to be outside is left out, and reported there.
    pub fn zero_rows(&self, rows: &LayerRows, indices: &Indices<'_>, stream: Stream) -> Result<()> {
        match self {
            Self::Host(host) => {
                let named = host.rows(indices)?;
                let _alone = host.write_all();
                zero_rows(rows.all(), &named)
            }
            Self::Device(launcher) => {
                launcher.begin(&[indices], stream)?;
                launcher.zero_rows(rows.kinds(), indices, stream)
            }
        }
    }

    /// Fills runs of rows with a byte in every buffer. Locks the section of each layer.
    ///
    /// # Errors
    /// [`ErrorKind::Index`](crate::base::ErrorKind::Index) for rows that are not there;
    /// [`ErrorKind::Driver`](crate::base::ErrorKind::Driver) when the driver refuses.
    pub fn fill_rows(
        &self,
        rows: &LayerRows,
        runs: &[Range<usize>],
        value: u8,
        stream: Stream,
    ) -> Result<()> {
        for layer in 0..rows.layers() {
            let _alone = match self {
                Self::Host(host) => Some(host.write(layer)),
                Self::Device(_) => None,
            };
            for buffer in rows.layer(layer)? {
                for run in runs {
                    let bytes = buffer.bytes_of(run);
                    match self {
                        Self::Host(_) => buffer.region().fill(bytes.start, bytes.len(), value)?,
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

    /// Zeroes the first columns of rows of a table, `(row, columns)` each.
    ///
    /// On a device the caller has seen that `stream` is not captured.
    ///
    /// # Errors
    /// [`ErrorKind::Index`](crate::base::ErrorKind::Index) for a place outside of the table,
    /// [`ErrorKind::Config`](crate::base::ErrorKind::Config) for more than cross to a device at once.
    pub fn zero_columns(&self, table: &Table<'_>, rows: &[(u32, u32)], stream: Stream) -> Result<()> {
        match self {
            Self::Host(_) => zero_columns(table, rows),
            Self::Device(launcher) => launcher.zero_columns(table, rows, stream),
        }
    }

    /// Writes the first slots of each row of a table one after the other: row `rows[i]` gives
    /// `out[indptr[i]..indptr[i + 1]]`. `out` is contiguous int32 where the table is; `indptr` has one number more than
    /// `rows`.
    ///
    /// # Errors
    /// [`ErrorKind::Index`](crate::base::ErrorKind::Index) when a row is not in the table or a part not in `out`. Nothing is
    /// written then. As [`Executor::fault`]; what only the device knows to be wrong is left out, and reported there.
    pub fn build_kv_indices(
        &self,
        table: &Table<'_>,
        rows: &Indices<'_>,
        indptr: &Indices<'_>,
        out: &Borrowed<'_>,
        stream: Stream,
    ) -> Result<()> {
        match self {
            Self::Host(host) => {
                let ends = indptr.on_host()?.clone().into_i64()?;
                build_kv_indices(table, &host.rows(rows)?, &ends, out)
            }
            Self::Device(launcher) => {
                launcher.begin(&[rows, indptr], stream)?;
                let row_list = rows.list(launcher.spaces()[0])?;
                let end_list = match indptr {
                    Indices::Device { .. } => Vec::new(),
                    Indices::Host(ends) => {
                        let ends = ends.clone().into_i64()?;
                        for (position, pair) in ends.windows(2).enumerate() {
                            part(position, pair[0], pair[1], table.columns(), out.shape().numel())?;
                        }
                        IndexVec::I64(ends).into_i32()?
                    }
                };
                out.used_on(stream);
                let numbers = [rows.numbers(&row_list), indptr.numbers(&end_list)];
                launcher.kv_indices(table, numbers, out, rows.len(), stream)
            }
        }
    }
}
