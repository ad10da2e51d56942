//! Fixed-size pages of numbers, with a free list.

use std::fmt;
use std::sync::Arc;

use crate::base::bounded::narrow;
use crate::base::lock_order::{LockRank, RankedGuard, RankedMutex};
use crate::base::{DType, Device, Error, ErrorKind, Id, PoolPage, Result, bytes_of, widen};
use crate::index::{BadFree, BadFrees, IndexHandle, Ledgered, OnBadFree, RefCounts, on_bad_frees};
use crate::memory::{Backend, Contents, Region, Stream, release_parked};
use crate::tensor::TensorView;

use super::contract::{Occupancy, Pool, Stats};
use super::{at_least_one, fits_int32};

/// The shape of a [`PagePool`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageConfig {
    /// Elements of a page.
    pub page_size: usize,
    /// Initial number of pages.
    pub initial_pages: usize,
    /// Element type.
    pub dtype: DType,
    /// Number of pages that `alloc` adds when all are in use.
    pub grow: usize,
    /// Whether an invalid free is an error.
    pub strict: bool,
}

/// Fixed-size pages, numbered from 0, handed out last in, first out.
///
/// The pool never shrinks. Growing adds a region and moves none, so every page keeps its address.
///
/// ```
/// use std::sync::Arc;
/// use kvpool::base::{DType, Id};
/// use kvpool::memory::{Backend, Host, Stream};
/// use kvpool::pool::{PageConfig, PagePool};
/// let config =
///     PageConfig { page_size: 16, initial_pages: 2, dtype: DType::F32, grow: 1, strict: false };
/// let host: Arc<dyn Backend> = Arc::new(Host);
/// let pool = PagePool::new(&config, &host).unwrap();
/// let alloc = || pool.alloc(Stream::DEFAULT).unwrap().map(Id::number);
/// assert_eq!([alloc(), alloc(), alloc()], [Some(0), Some(1), Some(2)]);
/// assert_eq!(pool.free(1).unwrap().dropped(), 0);
/// assert_eq!(alloc(), Some(1));
/// assert_eq!(pool.page(2).unwrap().shape().as_slice(), [16]);
/// ```
pub struct PagePool {
    config: PageConfig,
    backend: Arc<dyn Backend>,
    page_bytes: usize,
    state: RankedMutex<PageState>,
}

impl fmt::Debug for PagePool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PagePool")
            .field("page_size", &self.config.page_size)
            .field("initial_pages", &self.config.initial_pages)
            .field("dtype", &self.config.dtype)
            .field("device", &self.backend.device())
            .finish_non_exhaustive()
    }
}

/// What a [`PagePool`] locks.
#[derive(Debug, Default)]
struct PageState {
    pages: Ledgered<RefCounts<PoolPage>>,
    /// The regions of the pages, in their order, each with the number of its first page.
    regions: Vec<(u32, Arc<Region>)>,
}

impl PagePool {
    /// Creates a pool with its first pages.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](crate::base::ErrorKind::Config) for a page of no elements and for sizes whose
    /// bytes overflow; the error of the backend if it runs out of memory.
    pub fn new(config: &PageConfig, backend: &Arc<dyn Backend>) -> Result<Self> {
        at_least_one(&[("page_size", config.page_size)])?;
        let page_bytes = bytes_of("a page", &[config.page_size], config.dtype)?;
        let (backend, state) =
            (Arc::clone(backend), RankedMutex::new(LockRank::PagePool, PageState::default()));
        let pool = Self { config: *config, backend, page_bytes, state };
        // Before the lock: zeros for every stream are waited for.
        let mut first = PageState::default();
        pool.add(&mut first, config.initial_pages, Contents::Zeros)?;
        *pool.state() = first;
        Ok(pool)
    }

    /// Adds pages, or changes nothing.
    fn add(&self, state: &mut PageState, count: usize, contents: Contents) -> Result<()> {
        let total = state.pages.capacity();
        let end = fits_int32("pages", total.checked_add(count))?;
        let first = narrow(total);
        if count == 0 {
            return Ok(());
        }
        let bytes = bytes_of("pages", &[count, self.config.page_size], self.config.dtype)?;
        let region = Region::with(Arc::clone(&self.backend), bytes, contents, Arc::default())?;
        if let Contents::ZerosOn(stream) = contents {
            region.record_stream(stream);
        }
        state.pages.extend(end - first)?;
        state.pages.offer(first..end);
        state.regions.push((first, Arc::new(region)));
        Ok(())
    }

    /// Returns the config of the pool.
    #[must_use]
    pub const fn config(&self) -> &PageConfig {
        &self.config
    }

    /// Returns the device of the pages.
    #[must_use]
    pub fn device(&self) -> Device {
        self.backend.device()
    }

    /// Calls `read` with the ownership of pages, under the lock of the pool.
    pub fn with_pages<R>(&self, read: impl FnOnce(&Ledgered<RefCounts<PoolPage>>) -> R) -> R {
        read(&self.state().pages)
    }

    fn state(&self) -> RankedGuard<'_, PageState> {
        self.state.lock()
    }

    /// Returns the number of bytes of all pages.
    #[must_use]
    pub fn mem_bytes(&self) -> usize {
        self.state().regions.iter().map(|(_, region)| region.bytes()).sum()
    }

    /// Takes a page. `None` if all are in use and the pool does not grow.
    ///
    /// New pages on a GPU are zeroed in the order of `stream`: another stream needs an event.
    ///
    /// # Errors
    /// The error of the backend if it runs out of memory for new pages; nothing is changed.
    pub fn alloc(&self, stream: Stream) -> Result<Option<PoolPage>> {
        match self.take(stream) {
            // Waits for memory that was given back while it was in use.
            Err(failure) if failure.kind() == ErrorKind::OutOfMemory && release_parked() => self.take(stream),
            taken => taken,
        }
    }

    fn take(&self, stream: Stream) -> Result<Option<PoolPage>> {
        let state = &mut *self.state();
        if self.config.grow > 0 && state.pages.ready() == 0 {
            if let Some(gpu) = self.backend.gpu() {
                gpu.check_not_capturing(stream, "a new page, which is zeroed once,")?;
            }
            self.add(state, self.config.grow, Contents::ZerosOn(stream))?;
        }
        Ok(state.pages.take().map(IndexHandle::index))
    }

    /// Frees a page; drops and reports a page that is not in use.
    ///
    /// # Errors
    /// If strict, [`ErrorKind::IndexOwnership`](crate::base::ErrorKind::IndexOwnership) when the free is
    /// invalid.
    pub fn free(&self, page: i64) -> Result<BadFrees> {
        let pages = &mut self.state().pages;
        let is_of_others =
            || u32::try_from(page).is_ok_and(|page| pages.is_held_by_others(PoolPage::new(page)));
        let reason = pages.reason(page).or_else(|| is_of_others().then_some(BadFree::OtherOwner));
        let bad = reason.map_or_else(BadFrees::default, |reason| pages.bad_free(page, reason));
        let bad = on_bad_frees(bad, OnBadFree::of(self.config.strict), "page", 1, pages.capacity())?;
        let handle = u32::try_from(page).ok().and_then(|index| pages.handle(PoolPage::new(index)));
        match handle {
            Some(handle) if bad.dropped() == 0 => {
                // A page has one reference, because pages are not retained.
                if let Ok(Some(returning)) = pages.release(handle) {
                    pages.give_back(returning);
                }
            }
            _ => pages.count_dropped(),
        }
        Ok(bad)
    }

    /// Returns the elements of a page, in use or not, without a copy.
    ///
    /// # Errors
    /// [`ErrorKind::Index`](crate::base::ErrorKind::Index) for a page that does not exist.
    pub fn page(&self, page: i64) -> Result<TensorView> {
        let state = self.state();
        let total = state.pages.capacity();
        let number = u32::try_from(page).ok().filter(|&number| widen(number) < total);
        let number = number
            .ok_or_else(|| Error::index(format!("page {page} is outside [0, {total})")).with_index(page))?;
        let after = state.regions.partition_point(|(first, _)| *first <= number);
        let (first, region) = &state.regions[after - 1];
        let offset = widen(number - first) * self.page_bytes;
        TensorView::contiguous(Arc::clone(region), offset, self.config.dtype, &[self.config.page_size])
    }
}

impl Pool for PagePool {
    fn unit(&self) -> &'static str {
        "page"
    }

    fn unit_bytes(&self) -> Option<usize> {
        Some(self.config().page_size * self.config().dtype.size())
    }

    fn device(&self) -> Device {
        self.device()
    }

    fn strict(&self) -> bool {
        self.config().strict
    }

    fn stats(&self) -> Stats {
        self.with_pages(|pages| Stats::of_counts(pages)).and("bytes", self.mem_bytes())
    }

    fn occupancy(&self) -> Occupancy {
        self.with_pages(|pages| Occupancy::of_equal_units(pages.spans(), pages.ledger(), 1))
    }

    fn keep_ledger(&self) {
        self.state().pages.open_ledger();
    }
}
