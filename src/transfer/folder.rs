//! A [`Disk`](super::Disk) in a folder of this machine.

use std::fs::{DirBuilder, File, Metadata, OpenOptions};
use std::io::{ErrorKind, Result};
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

use crate::base::Error;
use crate::memory::{FileLock, TryLockResult, this_user};

use super::{AlignedBytes, BLOCK, Disk, DiskFile};

/// A folder with the files `pages`, `index` and `lock`, for one process at a time.
///
/// ```
/// use kvpool::transfer::{Disk, DiskFile, FileCaching, Folder};
/// let path = std::env::temp_dir().join(format!("kvpool-folder-{}", std::process::id()));
/// let folder = Folder::open(&path, FileCaching::Cached).unwrap();
/// assert_eq!(folder.write_at(DiskFile::Index, b"record", 0).unwrap(), 6);
/// assert_eq!(folder.bytes(DiskFile::Index).unwrap(), 6);
/// assert!(Folder::open(&path, FileCaching::Cached).is_err(), "it is in use");
/// # drop(folder);
/// # std::fs::remove_dir_all(path).unwrap();
/// ```
#[derive(Debug)]
pub struct Folder {
    /// The folder itself.
    names: File,
    pages: File,
    index: File,
    is_direct: bool,
    warnings: Vec<String>,
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
        let names = File::open(path).map_err(refused)?;
        let lock = match FileLock::try_lock(&path.join("lock")).map_err(refused)? {
            TryLockResult::Taken(lock) => lock,
            TryLockResult::Held(process) => {
                let holder = match process {
                    Some(process) if process == std::process::id() => format!("process {process}, this one"),
                    Some(process) => format!("process {process}"),
                    None => "a process that the system does not name".to_owned(),
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
        let mut warnings = Vec::new();
        for (name, file, others) in [
            // The names of files in a folder say nothing; whoever may change them can bring other files.
            ("", &names, libc::S_IWGRP | libc::S_IWOTH),
            ("/pages", &pages, libc::S_IRWXG | libc::S_IRWXO),
            ("/index", &index, libc::S_IRWXG | libc::S_IRWXO),
        ] {
            let about = file.metadata().map_err(refused)?;
            warnings.extend(access_warning(&format!("{}{name}", path.display()), &about, others));
        }
        Ok(Self { names, pages, index, is_direct, warnings, _lock: lock })
    }

    /// Returns a message for the folder and each file that other users may read or change.
    #[must_use]
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    fn file(&self, file: DiskFile) -> &File {
        match file {
            DiskFile::Pages => &self.pages,
            DiskFile::Index => &self.index,
        }
    }
}

/// Returns a message if a file belongs to a user who is neither that of this process nor the system's, or
/// others have one of the rights `others`.
fn access_warning(name: &str, about: &Metadata, others: u32) -> Option<String> {
    let risk = "who may read the pages of the store, or put others in their place";
    let (owner, mode) = (about.uid(), about.mode() & 0o7777);
    if owner != 0 && owner != this_user() {
        Some(format!("{name} belongs to user {owner}, {risk}"))
    } else if mode & others != 0 {
        Some(format!("{name} is open to other users, {risk}: its mode is {mode:o}"))
    } else {
        None
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

    fn flush(&self) -> Result<()> {
        for file in [&self.index, &self.names] {
            match file.sync_all() {
                // Some file systems cannot flush a folder.
                Err(cause) if matches!(cause.kind(), ErrorKind::InvalidInput | ErrorKind::Unsupported) => (),
                flushed => flushed?,
            }
        }
        Ok(())
    }

    fn is_direct(&self) -> bool {
        self.is_direct
    }

    fn is_reachable(&self) -> Result<bool> {
        Ok(self.index.metadata()?.nlink() > 0 && self.pages.metadata()?.nlink() > 0)
    }
}
