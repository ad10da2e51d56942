//! What goes back to the driver, once nothing that was enqueued uses it.
//!
//! Nobody waits for the whole device: that would spoil every capture on it. Only the streams that used the memory are
//! waited for; while one of them is captured, the memory is parked, and tried again whenever memory is taken or given back.

use std::sync::{Arc, Mutex};

use crate::base::Result;
use crate::base::sync::lock;
use crate::memory::{Keep, Stream, Users};

use super::Event;
use super::driver::{DevicePtr, Driver, StreamMode};
use super::gpu::{Gpu, is_forked};

/// Something that the driver gave.
#[derive(Debug)]
pub(super) enum Given {
    /// Device memory.
    Device(DevicePtr),
    /// Page-locked host memory.
    Host(HostPtr),
    /// The page-locking of others' host memory, and what keeps that mapped.
    Lock { address: HostPtr, _keep: Keep },
}

/// An address of host memory, which may go back on any thread.
#[derive(Debug)]
pub(super) struct HostPtr(pub(super) *mut u8);

// SAFETY: it is a name for the driver; nothing is read or written through it.
unsafe impl Send for HostPtr {}
// SAFETY: as above.
unsafe impl Sync for HostPtr {}

impl Given {
    /// # Safety
    /// It is what the driver gave, given back once, and nothing that was enqueued uses it.
    unsafe fn give_back(&self, driver: Driver) -> Result<()> {
        match self {
            // SAFETY: as the caller promises.
            Self::Device(address) => unsafe { driver.free(*address) },
            // SAFETY: as the caller promises.
            Self::Host(address) => unsafe { driver.free_host(address.0) },
            // SAFETY: as the caller promises.
            Self::Lock { address, .. } => unsafe { driver.unregister_host(address.0) },
        }
    }
}

/// Something whose users cannot all be awaited now.
#[derive(Debug)]
struct Parked {
    gpu: Arc<Gpu>,
    given: Given,
    /// Those that are left to be awaited.
    users: Vec<Stream>,
}

/// What goes back when its users can be awaited.
static PARKED: Mutex<Vec<Parked>> = Mutex::new(Vec::new());

/// Gives something back after the work of its users, for which it waits. What a stream uses that somebody captures now
/// goes back later.
///
/// # Safety
/// It is what the driver gave in the context of `gpu`, given back once, and nothing uses it but what was enqueued on `users`.
pub(super) unsafe fn retire(gpu: &Arc<Gpu>, given: Given, users: &Users) {
    // The child of a fork has none of it.
    if is_forked() {
        return;
    }
    lock(&PARKED).push(Parked { gpu: Arc::clone(gpu), given, users: users.streams() });
    sweep();
}

/// Gives back what was parked and can go now.
pub(super) fn sweep() {
    // Nobody waits under the lock.
    let parked = std::mem::take(&mut *lock(&PARKED));
    let left: Vec<_> = parked.into_iter().filter_map(Parked::finish).collect();
    lock(&PARKED).extend(left);
}

impl Parked {
    /// Awaits users and gives back; what has users that cannot be awaited now is returned.
    fn finish(mut self) -> Option<Self> {
        let gpu = &self.gpu;
        self.users.retain(|&stream| {
            let awaited = match gpu.mode(stream) {
                Ok(StreamMode::Running) => Event::record_if_there(gpu, stream)
                    .and_then(|event| event.map_or(Ok(()), |event| event.wait())),
                Ok(StreamMode::Gone) => Ok(()),
                Ok(StreamMode::Captured) => return true,
                Err(failure) => Err(failure),
            };
            awaited.is_err()
        });
        if !self.users.is_empty() {
            return Some(self);
        }
        let Ok(_entered) = gpu.enter_beside_captures() else { return Some(self) };
        // SAFETY: all of its users were awaited; the rest was promised to `retire`. An error may be that of earlier work, so
        // what it was said of is not given back twice.
        let _ = unsafe { self.given.give_back(gpu.driver()) };
        None
    }
}
