//! The file operations that a store needs.

use std::fmt::Debug;
use std::io::{Error, ErrorKind, Result};

/// Offsets, lengths and addresses are multiples of this many bytes wherever a disk is accessed without the
/// system's cache.
pub const BLOCK: usize = 4096;

/// A file of a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiskFile {
    /// Large blocks, read and written in whole.
    Pages,
    /// Small records, read when the store is opened.
    Index,
}

/// The two files of a store. Calls may come from several threads at once.
///
/// If the process is killed, the files have what its calls have written, in their order; the last write may
/// be cut short.
pub trait Disk: Debug + Send + Sync {
    /// Returns the bytes of a file.
    ///
    /// # Errors
    /// The errors of the system.
    fn bytes(&self, file: DiskFile) -> Result<u64>;

    /// Truncates a file to `bytes`.
    ///
    /// # Errors
    /// The errors of the system.
    fn truncate(&self, file: DiskFile, bytes: u64) -> Result<()>;

    /// Reads into `buffer`, and returns the number of bytes read, which may be smaller than its length; 0 at
    /// the end of the file. The pages file is read in whole [`BLOCK`]s, into memory aligned to one.
    ///
    /// # Errors
    /// The errors of the system.
    fn read_at(&self, file: DiskFile, buffer: &mut [u8], offset: u64) -> Result<usize>;

    /// Writes `bytes`, and returns the number of bytes written, which may be smaller. The pages file is
    /// written like it is read.
    ///
    /// # Errors
    /// The errors of the system.
    fn write_at(&self, file: DiskFile, bytes: &[u8], offset: u64) -> Result<usize>;

    /// Waits until the index, as it was written so far, and the names of the files survive a power cut.
    ///
    /// # Errors
    /// The errors of the system.
    fn flush(&self) -> Result<()>;

    /// Returns whether reads and writes of pages bypass the page cache.
    fn is_direct(&self) -> bool {
        false
    }

    /// Returns whether another process could still find the files.
    ///
    /// # Errors
    /// The errors of the system.
    fn is_reachable(&self) -> Result<bool> {
        Ok(true)
    }
}

/// Returns how many bytes of a call count as done: whole blocks, unless all bytes are done.
fn progress(disk: &dyn Disk, file: DiskFile, done: usize, asked: usize) -> usize {
    let whole = if disk.is_direct() && file == DiskFile::Pages { BLOCK } else { 1 };
    if done == asked { done } else { done / whole * whole }
}

/// Reads until `buffer` is full.
///
/// # Errors
/// [`ErrorKind::UnexpectedEof`] at the end of the file, and those of the disk.
pub(crate) fn read_whole(disk: &dyn Disk, file: DiskFile, buffer: &mut [u8], offset: u64) -> Result<()> {
    let mut at = 0;
    while at < buffer.len() {
        let asked = buffer.len() - at;
        match disk.read_at(file, &mut buffer[at..], offset + to_u64(at)) {
            Err(error) if error.kind() == ErrorKind::Interrupted => (),
            Err(error) => return Err(error),
            Ok(done) => match progress(disk, file, done, asked) {
                0 => return Err(Error::new(ErrorKind::UnexpectedEof, "the file ends early")),
                done => at += done,
            },
        }
    }
    Ok(())
}

/// Writes all of `bytes`.
///
/// # Errors
/// [`ErrorKind::WriteZero`] when the disk accepts no more bytes; the errors of the disk.
pub(crate) fn write_whole(disk: &dyn Disk, file: DiskFile, bytes: &[u8], offset: u64) -> Result<()> {
    let mut at = 0;
    while at < bytes.len() {
        match disk.write_at(file, &bytes[at..], offset + to_u64(at)) {
            Err(error) if error.kind() == ErrorKind::Interrupted => (),
            Err(error) => return Err(error),
            Ok(done) => match progress(disk, file, done, bytes.len() - at) {
                0 => return Err(Error::new(ErrorKind::WriteZero, "the disk takes no more bytes")),
                done => at += done,
            },
        }
    }
    Ok(())
}

/// Converts a number of bytes to 64 bits, which an address fits.
pub(crate) fn to_u64(bytes: usize) -> u64 {
    u64::try_from(bytes).expect("an address has 64 bits")
}

/// Bytes whose address is a multiple of [`BLOCK`].
#[derive(Debug)]
pub(crate) struct AlignedBytes {
    bytes: Vec<u8>,
    begin: usize,
    len: usize,
}

impl AlignedBytes {
    /// Creates a buffer of `len` zeros.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfMemory`](crate::base::ErrorKind::OutOfMemory) when the host cannot allocate them.
    pub(crate) fn new(len: usize) -> crate::base::Result<Self> {
        let bytes: Vec<u8> = crate::base::try_zeros(len + BLOCK)?;
        let begin = bytes.as_ptr().addr().next_multiple_of(BLOCK) - bytes.as_ptr().addr();
        Ok(Self { bytes, begin, len })
    }

    /// Returns the bytes.
    pub(crate) fn as_mut_slice(&mut self) -> &mut [u8] {
        &mut self.bytes[self.begin..self.begin + self.len]
    }
}
