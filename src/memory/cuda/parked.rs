//! Deferred release of driver resources: each is released once no enqueued work uses it.
//!
//! Nothing waits for the whole device, since that would invalidate every capture on it. Only the streams that
//! used the memory are waited for. While one of them is being captured, the memory is parked. Every later
//! allocation or release tries again, without waiting, since memory is also allocated under locks; who holds
//! none can wait, with [`release_parked`], which a debug build checks.

use std::sync::{Arc, Mutex};

use crate::base::Result;
use crate::base::sync::lock;
use crate::memory::forked::is_forked;
use crate::memory::{Keep, Stream, StreamSet};

use super::driver::{DevicePtr, Driver, StreamState};
use super::event::Event;
use super::gpu::Gpu;
use super::host_wait::HostWait;

/// A resource of the driver.
#[derive(Debug)]
pub(super) enum Resource {
    /// Device memory.
    Device(DevicePtr),
    /// Page-locked host memory.
    Host(HostPtr),
    /// The page-locking of host memory of another owner, and what keeps that memory mapped.
    Lock { address: HostPtr, _keep: Keep },
}

/// An address of host memory that may be released on any thread.
#[derive(Debug)]
pub(super) struct HostPtr(pub(super) *mut u8);

// SAFETY: it is a name for the driver; it is never dereferenced.
unsafe impl Send for HostPtr {}
// SAFETY: as above.
unsafe impl Sync for HostPtr {}

impl Resource {
    /// # Safety
    /// It came from the driver, is released once, and no enqueued work uses it.
    unsafe fn release(&self, driver: Driver) -> Result<()> {
        match self {
            // SAFETY: guaranteed by the caller.
            Self::Device(address) => unsafe { driver.free(*address) },
            // SAFETY: guaranteed by the caller.
            Self::Host(address) => unsafe { driver.free_host(address.0) },
            // SAFETY: guaranteed by the caller.
            Self::Lock { address, .. } => unsafe { driver.unregister_host(address.0) },
        }
    }
}

/// A resource whose users have not ended their work.
#[derive(Debug)]
struct ParkedResource {
    gpu: Arc<Gpu>,
    resource: Resource,
    /// The work still to wait for.
    users: Vec<PendingWork>,
}

/// Work of a stream that may use a resource.
#[derive(Debug)]
enum PendingWork {
    /// What is enqueued on the stream when it is not being captured.
    Of(Stream),
    /// What was enqueued before this point.
    Before(Event),
}

/// How to find out whether work is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Patience {
    /// Waits for it.
    Waits,
    /// Asks the device.
    Asks,
}

/// Resources to release once their users have ended their work.
static PARKED: Mutex<Vec<ParkedResource>> = Mutex::new(Vec::new());

/// Releases a resource after the work of its users, for which it waits, on whatever device they are. While a user
/// is being captured, the release is deferred.
///
/// # Safety
/// It came from the driver in the context of `gpu`, is released once, and only work enqueued on `users` uses
/// it.
pub(super) unsafe fn retire(gpu: &Arc<Gpu>, resource: Resource, users: &StreamSet) {
    give_up(gpu, resource, users, Patience::Waits);
}

/// Works like [`retire`], without waiting: the release is deferred until the users have ended their work.
///
/// # Safety
/// Same as [`retire`].
pub(super) unsafe fn park(gpu: &Arc<Gpu>, resource: Resource, users: &StreamSet) {
    give_up(gpu, resource, users, Patience::Asks);
}

fn give_up(gpu: &Arc<Gpu>, resource: Resource, users: &StreamSet, patience: Patience) {
    // The child of a fork owns nothing of the driver.
    if is_forked() {
        return;
    }
    let users = users.streams().into_iter().map(PendingWork::Of).collect();
    let given = ParkedResource { gpu: Arc::clone(gpu), resource, users };
    let parked = given.finish(patience);
    sweep();
    lock(&PARKED).extend(parked);
}

/// Releases the parked resources whose users have ended their work. Does not wait.
pub(super) fn sweep() {
    finish_all(Patience::Asks);
}

/// Waits for the users of memory that was given back while it could not be freed, as far as none of them is being
/// captured, and frees it. Returns whether there was any.
pub(crate) fn release_parked() -> bool {
    !is_forked() && finish_all(Patience::Waits)
}

/// Releases the parked resources whose users have ended their work. Returns whether there were any.
fn finish_all(patience: Patience) -> bool {
    // The lock is not held while waiting.
    let parked = std::mem::take(&mut *lock(&PARKED));
    let count = parked.len();
    let still_parked: Vec<_> = parked.into_iter().filter_map(|parked| parked.finish(patience)).collect();
    let has_released = still_parked.len() < count;
    lock(&PARKED).extend(still_parked);
    has_released
}

impl ParkedResource {
    /// Releases the resource after the work of its users. Returns it if that is not over.
    fn finish(mut self, patience: Patience) -> Option<Self> {
        let gpu = &self.gpu;
        self.users = self.users.into_iter().filter_map(|work| work.rest(gpu, patience)).collect();
        if !self.users.is_empty() {
            return Some(self);
        }
        let Ok(_entered) = gpu.enter_beside_captures() else { return Some(self) };
        // SAFETY: all of its users were waited for; the caller of `retire` or `park` guarantees the rest. An
        // error may stem from earlier work, so the release is never repeated.
        let _ = unsafe { self.resource.release(gpu.driver()) };
        None
    }
}

impl PendingWork {
    /// Returns what is left of the work; `None` when it is over.
    fn rest(self, gpu: &Arc<Gpu>, patience: Patience) -> Option<Self> {
        let done = match self {
            Self::Before(done) => done,
            // On the stream's own device: the memory may be another's, or the host's.
            Self::Of(stream) => match gpu.stream_state(stream) {
                Ok(StreamState::Running) => match Event::record_if_alive(gpu, stream, HostWait::Sleeps) {
                    Ok(done) => done?,
                    Err(_) => return Some(self),
                },
                Ok(StreamState::Destroyed) => return None,
                Ok(StreamState::Captured) | Err(_) => return Some(self),
            },
        };
        let is_over = match patience {
            Patience::Waits => done.wait().map(|()| true),
            Patience::Asks => done.has_passed(),
        };
        if is_over.unwrap_or(false) { None } else { Some(Self::Before(done)) }
    }
}
