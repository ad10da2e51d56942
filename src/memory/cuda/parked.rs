//! Deferred release of driver resources: each is released once no enqueued work uses it.
//!
//! Nothing waits for the whole device, since that would invalidate every capture on it. Only the streams that
//! used the memory are waited for. While one of them is being captured, the memory is parked; every later
//! allocation or release tries again.

use std::sync::{Arc, Mutex};

use crate::base::Result;
use crate::base::sync::lock;
use crate::memory::{Keep, Stream, StreamSet};

use super::Event;
use super::driver::{DevicePtr, Driver, StreamState};
use super::gpu::{Gpu, is_forked};

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

/// A resource with users that cannot be waited for now.
#[derive(Debug)]
struct ParkedResource {
    gpu: Arc<Gpu>,
    resource: Resource,
    /// The users still to wait for.
    users: Vec<Stream>,
}

/// Resources to release once their users can be waited for.
static PARKED: Mutex<Vec<ParkedResource>> = Mutex::new(Vec::new());

/// Releases a resource after the work of its users, for which it waits, on whatever device they are. While a user
/// is being captured, the release is deferred.
///
/// # Safety
/// It came from the driver in the context of `gpu`, is released once, and only work enqueued on `users` uses
/// it.
pub(super) unsafe fn retire(gpu: &Arc<Gpu>, resource: Resource, users: &StreamSet) {
    // The child of a fork owns nothing of the driver.
    if is_forked() {
        return;
    }
    lock(&PARKED).push(ParkedResource { gpu: Arc::clone(gpu), resource, users: users.streams() });
    sweep();
}

/// Releases the parked resources whose users can be waited for.
pub(super) fn sweep() {
    // The lock is not held while waiting.
    let parked = std::mem::take(&mut *lock(&PARKED));
    let still_parked: Vec<_> = parked.into_iter().filter_map(ParkedResource::finish).collect();
    lock(&PARKED).extend(still_parked);
}

impl ParkedResource {
    /// Waits for the users and releases the resource. Returns it if a user cannot be waited for now.
    fn finish(mut self) -> Option<Self> {
        let gpu = &self.gpu;
        self.users.retain(|&stream| {
            // Each on the stream's own device: the memory may be another's, or the host's.
            let awaited = match gpu.stream_state(stream) {
                Ok(StreamState::Running) => Event::record_if_alive(gpu, stream)
                    .and_then(|event| event.map_or(Ok(()), |event| event.wait())),
                Ok(StreamState::Destroyed) => Ok(()),
                Ok(StreamState::Captured) => return true,
                Err(failure) => Err(failure),
            };
            awaited.is_err()
        });
        if !self.users.is_empty() {
            return Some(self);
        }
        let Ok(_entered) = gpu.enter_beside_captures() else { return Some(self) };
        // SAFETY: all of its users were waited for; the caller of `retire` guarantees the rest. An error may
        // stem from earlier work, so the release is never repeated.
        let _ = unsafe { self.resource.release(gpu.driver()) };
        None
    }
}
