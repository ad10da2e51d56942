//! A disk in memory that fails as planned, and has the contents that a killed process leaves.

use std::io::{Error, ErrorKind, Result};
use std::sync::{Mutex, MutexGuard};

use kvpool::transfer::{Disk, DiskFile};

/// The fault of one call.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Fault {
    /// The call fails.
    Error(ErrorKind),
    /// The call does no more than this many bytes.
    Short(usize),
    /// The call writes no more than this many bytes, and no later call does anything: the process is killed.
    Killed(usize),
}

/// Two files in memory.
#[derive(Debug)]
pub(crate) struct MemoryDisk(Mutex<Files>);

#[derive(Debug)]
pub(crate) struct Files {
    pub(crate) pages: Vec<u8>,
    pub(crate) index: Vec<u8>,
    /// The number of calls until a fault.
    pub(crate) fault: Option<(usize, Fault)>,
    /// Bytes of the pages for which there is space.
    pub(crate) space: usize,
    pub(crate) is_killed: bool,
    pub(crate) is_removed: bool,
    /// The number of calls.
    pub(crate) calls: usize,
    /// The index as it survives a power cut.
    pub(crate) flushed: Vec<u8>,
}

impl Default for MemoryDisk {
    fn default() -> Self {
        Self(Mutex::new(Files {
            pages: Vec::new(),
            index: Vec::new(),
            fault: None,
            space: usize::MAX,
            is_killed: false,
            is_removed: false,
            calls: 0,
            flushed: Vec::new(),
        }))
    }
}

impl MemoryDisk {
    pub(crate) fn files(&self) -> MutexGuard<'_, Files> {
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

impl Files {
    fn file(&mut self, file: DiskFile) -> &mut Vec<u8> {
        match file {
            DiskFile::Pages => &mut self.pages,
            DiskFile::Index => &mut self.index,
        }
    }

    /// The bytes that a call of `asked` bytes does.
    fn call(&mut self, asked: usize) -> Result<usize> {
        if self.is_killed {
            return Err(Error::other("killed"));
        }
        self.calls += 1;
        match self.fault {
            Some((0, fault)) => {
                self.fault = None;
                match fault {
                    Fault::Error(kind) => Err(kind.into()),
                    Fault::Short(most) => Ok(asked.min(most)),
                    Fault::Killed(most) => {
                        self.is_killed = true;
                        Ok(asked.min(most))
                    }
                }
            }
            Some((left, fault)) => {
                self.fault = Some((left - 1, fault));
                Ok(asked)
            }
            None => Ok(asked),
        }
    }
}

fn place(offset: u64) -> usize {
    usize::try_from(offset).expect("an address")
}

impl Disk for MemoryDisk {
    fn bytes(&self, file: DiskFile) -> Result<u64> {
        let mut files = self.files();
        files.call(0)?;
        Ok(u64::try_from(files.file(file).len()).expect("an address"))
    }

    fn truncate(&self, file: DiskFile, bytes: u64) -> Result<()> {
        let mut files = self.files();
        files.call(0)?;
        files.file(file).truncate(place(bytes));
        Ok(())
    }

    fn read_at(&self, file: DiskFile, buffer: &mut [u8], offset: u64) -> Result<usize> {
        let mut files = self.files();
        let asked = files.call(buffer.len())?;
        let bytes = files.file(file);
        let begin = place(offset).min(bytes.len());
        let found = &bytes[begin..bytes.len().min(begin + asked)];
        buffer[..found.len()].copy_from_slice(found);
        Ok(found.len())
    }

    fn write_at(&self, file: DiskFile, bytes: &[u8], offset: u64) -> Result<usize> {
        let mut files = self.files();
        let done = files.call(bytes.len())?;
        let (begin, space) = (place(offset), files.space);
        if file == DiskFile::Pages && begin + done > space {
            return Err(ErrorKind::StorageFull.into());
        }
        let target = files.file(file);
        if done > 0 && target.len() < begin + done {
            target.resize(begin + done, 0);
        }
        target[begin..begin + done].copy_from_slice(&bytes[..done]);
        if files.is_killed { Err(Error::other("killed")) } else { Ok(done) }
    }

    fn flush(&self) -> Result<()> {
        let mut files = self.files();
        files.call(0)?;
        let index = files.index.clone();
        files.flushed = index;
        Ok(())
    }

    fn is_reachable(&self) -> Result<bool> {
        Ok(!self.files().is_removed)
    }
}

/// A hash that misses no change of a few bytes, and takes little time without optimisation.
pub(crate) fn digest(parts: &[&[u8]]) -> [u8; 32] {
    let mut sum = 0x9e37_79b9_7f4a_7c15_u64;
    for part in parts {
        let (words, rest) = part.as_chunks::<8>();
        for word in words {
            sum = (sum ^ u64::from_le_bytes(*word)).wrapping_mul(0xff51_afd7_ed55_8ccd).rotate_left(29);
        }
        for byte in rest {
            sum = (sum ^ u64::from(*byte)).wrapping_mul(0xc4ce_b9fe_1a85_ec53).rotate_left(31);
        }
    }
    let mut hash = [0; 32];
    for (at, word) in hash.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        *word = sum.wrapping_mul(2 * u64::try_from(at).expect("a small number") + 1).to_le_bytes();
    }
    hash
}
