//! A lock on a file, which belongs to this process and is released when the process ends for any reason.

use std::collections::HashSet;
use std::fs::{self, File, Metadata, OpenOptions};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::process;
use std::sync::{LazyLock, Mutex};

use crate::base::sync::lock;

/// A file of this process: the process, the device and the inode. The child of a fork has none of its
/// parent's.
type Claim = (u32, u64, u64);

/// The files that this process has locked. They are listed here because the system's lock excludes other
/// processes only.
static CLAIMS: LazyLock<Mutex<HashSet<Claim>>> = LazyLock::new(Mutex::default);

/// An exclusive lock on a file among all processes of this machine, held until it is dropped or the process
/// ends.
///
/// The child of a fork neither inherits the lock nor keeps others from taking it.
#[derive(Debug)]
pub(crate) struct FileLock {
    /// `None` only during drop.
    file: Option<File>,
    claim: Claim,
}

/// The result of [`FileLock::try_lock`].
#[derive(Debug)]
pub(crate) enum TryLockResult {
    /// This process has the lock now.
    Taken(FileLock),
    /// The process with this number has it; `None` if the system names none, as that has ended since or is on
    /// another machine.
    Held(Option<u32>),
}

impl FileLock {
    /// Locks the file at `path`, which is made if it is missing, without waiting. Nothing else in this
    /// process may open it: the system ends the lock when any handle of the file is closed.
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
            // Another thread was faster, and closing this handle would end its lock.
            std::mem::forget(file);
            return Ok(TryLockResult::Held(Some(this)));
        }
        // From here on the claim is dropped again unless the lock is returned.
        let held = Self { file: Some(file), claim };
        let mut request = whole_file();
        match held.fcntl(libc::F_SETLK, &mut request) {
            Ok(()) => return Ok(TryLockResult::Taken(held)),
            Err(error) if matches!(error.raw_os_error(), Some(libc::EACCES | libc::EAGAIN)) => (),
            Err(error) => return Err(error),
        }
        let mut holder = whole_file();
        held.fcntl(libc::F_GETLK, &mut holder)?;
        Ok(TryLockResult::Held(u32::try_from(holder.l_pid).ok().filter(|process| *process > 0)))
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
        // First: closing it later would end the lock of another thread that has claimed it in between.
        self.file = None;
        lock(&CLAIMS).remove(&self.claim);
    }
}

/// Returns the request to write anywhere in a file.
fn whole_file() -> libc::flock {
    // SAFETY: it consists of numbers, for which zeros are valid.
    let mut request: libc::flock = unsafe { MaybeUninit::zeroed().assume_init() };
    request.l_type = WRITE;
    request.l_whence = FROM_START;
    request
}

/// The constants have other types than the fields on some systems; the values are tiny.
#[expect(clippy::cast_possible_truncation, reason = "1 and 0")]
const WRITE: libc::c_short = libc::F_WRLCK as libc::c_short;
#[expect(clippy::cast_possible_truncation, reason = "0")]
const FROM_START: libc::c_short = libc::SEEK_SET as libc::c_short;
