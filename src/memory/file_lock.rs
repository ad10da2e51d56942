//! A lock on a file, which belongs to this process and is released when the process ends for any reason.

use std::collections::HashSet;
use std::fs::{self, File, Metadata, OpenOptions};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::process;
use std::sync::atomic::{AtomicI32, Ordering::SeqCst};
use std::sync::{LazyLock, Mutex, Once};

use crate::base::sync::lock;

/// A file of this process: the process, the device and the inode. The child of a fork has none of its
/// parent's.
type Claim = (u32, u64, u64);

/// The files that this process has locked, for the message: the system does not name this process.
static CLAIMS: LazyLock<Mutex<HashSet<Claim>>> = LazyLock::new(Mutex::default);

/// An exclusive lock on a file among all processes of this machine, held until it is dropped or the process
/// ends.
///
/// It is a lock of the open file (`F_OFD_SETLK`) where the system has such locks: other code of this process
/// may open the file, copy it and close it. Elsewhere it ends when any handle of the file is closed. The child
/// of a fork neither inherits the lock nor keeps others from taking it: it closes the handle when it begins.
#[derive(Debug)]
pub(crate) struct FileLock {
    /// `None` only during drop.
    file: Option<File>,
    claim: Claim,
    /// The place where the child of a fork finds the handle; `None` if there was none left.
    inherited: Option<Inherited>,
}

/// The result of [`FileLock::try_lock`].
#[derive(Debug)]
pub(crate) enum TryLockResult {
    /// This process has the lock now.
    Taken(FileLock),
    /// The process with this number has it; `None` if the system names none, as that has ended since, is on
    /// another machine, or has closed another handle of the file.
    Held(Option<u32>),
}

impl FileLock {
    /// Locks the file at `path`, which is made if it is missing, without waiting.
    ///
    /// # Errors
    /// The errors of the system, where it cannot open or lock the file.
    pub(crate) fn try_lock(path: &Path) -> io::Result<TryLockResult> {
        let this = process::id();
        let claim_of = |about: Metadata| (this, about.dev(), about.ino());
        if fs::metadata(path).is_ok_and(|about| lock(&CLAIMS).contains(&claim_of(about))) {
            return Ok(TryLockResult::Held(Some(this)));
        }
        let mut options = OpenOptions::new();
        options
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .custom_flags(libc::O_NOFOLLOW);
        let file = options.open(path)?;
        let claim = claim_of(file.metadata()?);
        if !lock(&CLAIMS).insert(claim) {
            // Another thread was faster. Where closing this handle would end its lock, the handle stays.
            std::mem::forget(file);
            return Ok(TryLockResult::Held(Some(this)));
        }
        // From here on the claim is dropped again unless the lock is returned.
        let inherited = Inherited::new(file.as_raw_fd());
        let held = Self { file: Some(file), claim, inherited };
        let is_taken = match held.set(OF_FILE, LOCK, 1) {
            // The system has no locks of open files.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) && OF_FILE != OF_PROCESS => {
                held.set(OF_PROCESS, LOCK, 1)
            }
            is_taken => is_taken,
        }?;
        if is_taken {
            // Names this process to others. It ends when any handle of the file is closed, and nothing depends
            // on it.
            let _ = held.set(OF_PROCESS, NAME, 1);
            return Ok(TryLockResult::Taken(held));
        }
        // A lock of an earlier version covers both.
        let mut holder = request(LOCK, 2);
        held.fcntl(libc::F_GETLK, &mut holder)?;
        if holder.l_pid <= 0 {
            holder = request(NAME, 1);
            held.fcntl(libc::F_GETLK, &mut holder)?;
        }
        Ok(TryLockResult::Held(u32::try_from(holder.l_pid).ok().filter(|process| *process > 0)))
    }

    /// Tries to lock bytes of the file. Returns whether they are locked now.
    fn set(&self, command: libc::c_int, begin: libc::off_t, bytes: libc::off_t) -> io::Result<bool> {
        match self.fcntl(command, &mut request(begin, bytes)) {
            Ok(()) => Ok(true),
            Err(error) if matches!(error.raw_os_error(), Some(libc::EACCES | libc::EAGAIN)) => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn fcntl(&self, command: libc::c_int, request: &mut libc::flock) -> io::Result<()> {
        let file = self.file.as_ref().expect("`None` only during drop").as_raw_fd();
        // SAFETY: the handle is open, and the request is valid for reads and writes during the call.
        match unsafe { libc::fcntl(file, command, &raw mut *request) } {
            -1 => Err(io::Error::last_os_error()),
            _ => Ok(()),
        }
    }
}

impl Drop for FileLock {
    fn drop(&mut self) {
        if self.claim.0 != process::id() {
            // The child of a fork has closed the handle, and its number may be that of another file.
            std::mem::forget((self.file.take(), self.inherited.take()));
            return;
        }
        // A child that was forked before it could find the handle has the open file, too.
        let mut unlock = request(LOCK, 1);
        unlock.l_type = UNLOCK;
        let _ = self.fcntl(OF_FILE, &mut unlock);
        self.inherited = None;
        // First: closing it later would end the lock of another thread that has claimed it in between.
        self.file = None;
        lock(&CLAIMS).remove(&self.claim);
    }
}

/// The byte that is locked, and the one whose lock names the process.
const LOCK: libc::off_t = 0;
const NAME: libc::off_t = 1;

/// The commands to lock bytes for an open file, and for the process.
#[cfg(target_os = "linux")]
const OF_FILE: libc::c_int = libc::F_OFD_SETLK;
#[cfg(not(target_os = "linux"))]
const OF_FILE: libc::c_int = libc::F_SETLK;
const OF_PROCESS: libc::c_int = libc::F_SETLK;

/// Returns the request to write to some bytes of a file.
fn request(begin: libc::off_t, bytes: libc::off_t) -> libc::flock {
    // SAFETY: it consists of numbers, for which zeros are valid.
    let mut request: libc::flock = unsafe { MaybeUninit::zeroed().assume_init() };
    request.l_type = WRITE;
    request.l_whence = FROM_START;
    request.l_start = begin;
    request.l_len = bytes;
    request
}

/// The constants have other types than the fields on some systems; the values are tiny.
#[expect(clippy::cast_possible_truncation, reason = "1 and 0")]
const WRITE: libc::c_short = libc::F_WRLCK as libc::c_short;
#[expect(clippy::cast_possible_truncation, reason = "2")]
const UNLOCK: libc::c_short = libc::F_UNLCK as libc::c_short;
#[expect(clippy::cast_possible_truncation, reason = "0")]
const FROM_START: libc::c_short = libc::SEEK_SET as libc::c_short;

/// The handles that the child of a fork closes, where a lock of an open file would last as long as the child;
/// -1 in places without one. The child may neither lock nor allocate, so their number is fixed.
static INHERITED: [AtomicI32; 1024] = [const { AtomicI32::new(-1) }; 1024];

/// A handle that the child of a fork closes, until this is dropped.
#[derive(Debug)]
struct Inherited(&'static AtomicI32);

impl Inherited {
    /// Records a handle. `None` if too many are recorded: the child then keeps the lock until it ends.
    fn new(handle: RawFd) -> Option<Self> {
        static WATCH: Once = Once::new();
        WATCH.call_once(|| {
            // SAFETY: the handler uses atomics and `close`, which are allowed in the child of a fork.
            unsafe { libc::pthread_atfork(None, None, Some(close_inherited)) };
        });
        let is_free = |place: &&AtomicI32| place.compare_exchange(-1, handle, SeqCst, SeqCst).is_ok();
        INHERITED.iter().find(is_free).map(Self)
    }
}

impl Drop for Inherited {
    fn drop(&mut self) {
        self.0.store(-1, SeqCst);
    }
}

extern "C" fn close_inherited() {
    for place in &INHERITED {
        let handle = place.swap(-1, SeqCst);
        if handle >= 0 {
            // SAFETY: the handle was open in the parent, and only its owner would close it, which finds that
            // it is in a child.
            unsafe { libc::close(handle) };
        }
    }
}

/// Returns the number of the user whose rights this process has.
pub(crate) fn this_user() -> u32 {
    // SAFETY: the call has no conditions, and cannot fail.
    unsafe { libc::geteuid() }
}
