//! A [`Disk`](super::Disk) in a folder of this machine.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::Result;
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

use crate::base::Error;
use crate::memory::{FileLock, TryLockResult};

use super::{AlignedBytes, BLOCK, Disk, DiskFile};

/// A folder with the files `pages`, `index` and `lock`, for one process at a time.
#[derive(Debug)]
pub struct Folder {
    pages: File,
    index: File,
    is_direct: bool,
    _lock: FileLock,
}

/// Whether reads and writes of pages use the page cache of the system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileCaching {
    /// Reads and writes bypass the page cache, if the file system supports that.
    Direct,
    /// They use the page cache.
    Cached,
}

impl Folder {
    /// Opens the folder or creates it, with access for its owner only.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](crate::base::ErrorKind::Config), with the path and the cause, if the system
    /// refuses the folder or a file in it, or the folder is in use by a process, also this one.
    pub fn open(path: &Path, caching: FileCaching) -> crate::base::Result<Self> {
        let refused = |cause: std::io::Error| {
            Error::config(format!("{} cannot be used: {cause}", path.display())).with_source(cause)
        };
        DirBuilder::new().recursive(true).mode(0o700).create(path).map_err(refused)?;
        let open = |name: &str, flags: i32| {
            let mut options = OpenOptions::new();
            options.read(true).write(true).create(true).truncate(false).mode(0o600);
            options.custom_flags(flags | libc::O_NOFOLLOW).open(path.join(name))
        };
        let lock = match FileLock::try_lock(&path.join("lock")).map_err(refused)? {
            TryLockResult::Taken(lock) => lock,
            TryLockResult::Held(process) => {
                let holder = match process {
                    Some(process) if process == std::process::id() => format!("process {process}, this one"),
                    Some(process) => format!("process {process}"),
                    None => "a process on another machine, or one that has just ended".to_owned(),
                };
                return Err(Error::config(format!("{} is in use by {holder}", path.display())));
            }
        };
        let index = open("index", 0).map_err(refused)?;
        let direct = match caching {
            FileCaching::Direct => open("pages", DIRECT).ok().filter(takes_blocks),
            FileCaching::Cached => None,
        };
        let is_direct = direct.is_some() && DIRECT != 0;
        let pages = direct.map_or_else(|| open("pages", 0), Ok).map_err(refused)?;
        Ok(Self { pages, index, is_direct, _lock: lock })
    }

    fn file(&self, file: DiskFile) -> &File {
        match file {
            DiskFile::Pages => &self.pages,
            DiskFile::Index => &self.index,
        }
    }
}

#[cfg(target_os = "linux")]
const DIRECT: i32 = libc::O_DIRECT;
#[cfg(not(target_os = "linux"))]
const DIRECT: i32 = 0;

/// Returns whether a block can be read. Some file systems accept the flag for direct access and refuse the
/// reads.
fn takes_blocks(file: &File) -> bool {
    AlignedBytes::new(BLOCK).is_ok_and(|mut block| file.read_at(block.as_mut_slice(), 0).is_ok())
}

impl Disk for Folder {
    fn bytes(&self, file: DiskFile) -> Result<u64> {
        Ok(self.file(file).metadata()?.len())
    }

    fn truncate(&self, file: DiskFile, bytes: u64) -> Result<()> {
        self.file(file).set_len(bytes)
    }

    fn read_at(&self, file: DiskFile, buffer: &mut [u8], offset: u64) -> Result<usize> {
        self.file(file).read_at(buffer, offset)
    }

    fn write_at(&self, file: DiskFile, bytes: &[u8], offset: u64) -> Result<usize> {
        self.file(file).write_at(bytes, offset)
    }

    fn is_direct(&self) -> bool {
        self.is_direct
    }

    fn is_reachable(&self) -> Result<bool> {
        Ok(self.index.metadata()?.nlink() > 0 && self.pages.metadata()?.nlink() > 0)
    }
}
