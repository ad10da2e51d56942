//! Opening a store: reading its files, and fitting them to its capacity.

use std::collections::HashSet;
use std::io;

use crate::base::{
    Error, Id, Result, out_of_memory_error, try_push, try_to_vec, try_with_capacity, try_zeros, widen,
};
use crate::cache::{Digest, PageHash, PolicyKind};
use crate::transfer::{AlignedBytes, BLOCK, Disk, DiskFile, read_whole, to_u64, write_whole};

use super::layout::{
    ENTRY_BYTES, FileSlot, Header, Record, check_header, entry_offset, header, page_offset, page_sum,
};
use super::slots::Slots;

/// Bytes of the index that are read at once.
const PIECE: usize = 1 << 20;

/// The files of a store while it is opened.
pub(super) struct Opening<'a> {
    pub(super) disk: &'a dyn Disk,
    pub(super) digest: Digest,
    pub(super) page_bytes: usize,
    pub(super) slot_bytes: usize,
    /// Slots of the capacity.
    pub(super) count: usize,
    pub(super) policy: PolicyKind,
}

/// A page and its slot.
type Page = (FileSlot, Record);

/// The slots and the damage that were found.
pub(super) struct FoundSlots {
    pub(super) slots: Slots,
    /// The largest tick, or 0.
    pub(super) last_tick: u64,
    /// The number of damaged entries and pages.
    pub(super) damaged: usize,
    /// The bytes of pages that had no index, and were dropped.
    pub(super) lost_bytes: Option<u64>,
}

/// Clears the entries of slots in the index, as many as possible.
///
/// # Errors
/// The first failure.
pub(super) fn clear_entries(disk: &dyn Disk, slots: &[FileSlot]) -> io::Result<()> {
    let mut sorted = try_to_vec(slots).map_err(io::Error::other)?;
    sorted.sort_unstable();
    let (mut cleared, longest) = (Ok(()), sorted.len().min(PIECE / ENTRY_BYTES));
    let zeros = try_zeros(longest * ENTRY_BYTES).map_err(io::Error::other)?;
    for run in sorted
        .chunk_by(|slot, next| slot.number() + 1 == next.number())
        .flat_map(|run| run.chunks(PIECE / ENTRY_BYTES))
    {
        let zeros = &zeros[..run.len() * ENTRY_BYTES];
        cleared = cleared.and(write_whole(disk, DiskFile::Index, zeros, entry_offset(run[0])));
    }
    cleared
}

fn open_error(cause: io::Error) -> Error {
    Error::config(format!("its files cannot be read and written: {cause}")).with_source(cause)
}

impl Opening<'_> {
    /// Returns the pages that are in the files: where there are more than the capacity has slots, those used
    /// last.
    pub(super) fn run(&self) -> Result<FoundSlots> {
        let lost_bytes = self.check_header()?;
        let (mut pages, mut unfit) = self.read_index()?;
        let mut damaged = unfit.len();
        // The last used first, so that of two with one key that one stays.
        pages.sort_unstable_by_key(|(slot, record)| (std::cmp::Reverse(record.tick), *slot));
        let mut known = HashSet::new();
        known.try_reserve(pages.len()).map_err(|_| out_of_memory_error::<PageHash>(pages.len()))?;
        let mut kept = try_with_capacity(pages.len().min(self.count))?;
        for (slot, record) in pages {
            if !known.insert(record.key) {
                try_push(&mut unfit, slot)?;
            } else if kept.len() < self.count {
                kept.push((slot, record));
            }
        }
        // A damaged entry could become valid when other entries are written, and one of two duplicates could
        // remain without the other.
        clear_entries(self.disk, &unfit).map_err(open_error)?;
        damaged += self.move_down(&mut kept)?;
        self.cut()?;
        kept.reverse();
        let mut slots = Slots::new(self.count, self.policy);
        slots.fill(&kept)?;
        let last_tick = kept.last().map_or(0, |(_, record)| record.tick);
        Ok(FoundSlots { slots, last_tick, damaged, lost_bytes })
    }

    /// Checks the header, and writes that of a new store. Returns the bytes of pages that have lost their
    /// index, which are dropped.
    fn check_header(&self) -> Result<Option<u64>> {
        let index = self.disk.bytes(DiskFile::Index).map_err(open_error)?;
        let there = usize::try_from(index).unwrap_or(BLOCK).min(BLOCK);
        let mut block = try_zeros(there)?;
        read_whole(self.disk, DiskFile::Index, &mut block, 0).map_err(open_error)?;
        if check_header(self.digest, self.page_bytes, &block)? == Header::Whole {
            return Ok(None);
        }
        if !self.begins_anew()? {
            return Err(Error::config("its file index is not that of a store"));
        }
        let lost = self.disk.bytes(DiskFile::Pages).map_err(open_error)?;
        for file in [DiskFile::Index, DiskFile::Pages] {
            self.disk.truncate(file, 0).map_err(open_error)?;
        }
        write_whole(self.disk, DiskFile::Index, &header(self.digest, self.page_bytes), 0)
            .and_then(|()| self.disk.flush())
            .map_err(open_error)?;
        Ok((lost > 0).then_some(lost))
    }

    /// Returns whether an index whose header is not whole is that of a store: nothing follows, or an entry.
    fn begins_anew(&self) -> Result<bool> {
        let end = self.disk.bytes(DiskFile::Index).map_err(open_error)?;
        let mut is_empty = true;
        let is_ours = self.any_entry(end, |slot, entry| {
            is_empty &= *entry == [0; ENTRY_BYTES];
            Ok(Record::decode(self.digest, slot, entry).is_some())
        })?;
        Ok(is_ours || is_empty)
    }

    /// Calls `is_found` with the entries of the index before the byte `end`, until one is found. Returns
    /// whether one was.
    fn any_entry(
        &self,
        end: u64,
        mut is_found: impl FnMut(FileSlot, &[u8; ENTRY_BYTES]) -> Result<bool>,
    ) -> Result<bool> {
        let mut slot = FileSlot::new(0);
        let mut piece = try_zeros(PIECE.min(usize::try_from(end).unwrap_or(PIECE)))?;
        while slot.number() < u32::MAX && entry_offset(slot) < end {
            let left = (end - entry_offset(slot)) / to_u64(ENTRY_BYTES);
            let entries =
                usize::try_from(left).map_or(PIECE / ENTRY_BYTES, |left| left.min(PIECE / ENTRY_BYTES));
            if entries == 0 {
                break;
            }
            let piece = &mut piece[..entries * ENTRY_BYTES];
            read_whole(self.disk, DiskFile::Index, piece, entry_offset(slot)).map_err(open_error)?;
            for entry in piece.as_chunks::<ENTRY_BYTES>().0 {
                if is_found(slot, entry)? {
                    return Ok(true);
                }
                let Some(next) = slot.number().checked_add(1) else { break };
                slot = FileSlot::new(next);
            }
        }
        Ok(false)
    }

    /// Returns the pages that lie in the file, and the slots of other entries.
    fn read_index(&self) -> Result<(Vec<Page>, Vec<FileSlot>)> {
        let end = self.disk.bytes(DiskFile::Index).map_err(open_error)?;
        let pages = self.disk.bytes(DiskFile::Pages).map_err(open_error)?;
        let whole = pages / to_u64(self.slot_bytes);
        let (mut records, mut unfit) = (Vec::new(), Vec::new());
        self.any_entry(end, |slot, entry| {
            if *entry != [0; ENTRY_BYTES] {
                match Record::decode(self.digest, slot, entry) {
                    Some(record) if u64::from(slot.number()) < whole => {
                        try_push(&mut records, (slot, record))?;
                    }
                    _ => try_push(&mut unfit, slot)?,
                }
            }
            Ok(false)
        })?;
        Ok((records, unfit))
    }

    /// Moves pages from slots behind the capacity to others. Returns the number of those that were damaged.
    fn move_down(&self, kept: &mut Vec<Page>) -> Result<usize> {
        if kept.iter().all(|(slot, _)| widen(slot.number()) < self.count) {
            return Ok(0);
        }
        let mut used = HashSet::new();
        used.try_reserve(kept.len()).map_err(|_| out_of_memory_error::<FileSlot>(kept.len()))?;
        used.extend(kept.iter().map(|(slot, _)| *slot));
        let end = self.end();
        let mut free = (0..end.number()).map(FileSlot::new).filter(|slot| !used.contains(slot));
        let mut bytes = AlignedBytes::new(self.slot_bytes)?;
        let mut damaged = 0;
        for (slot, record) in kept.iter_mut().filter(|(slot, _)| *slot >= end) {
            let from = page_offset(*slot, self.slot_bytes);
            let is_read = read_whole(self.disk, DiskFile::Pages, bytes.as_mut_slice(), from).is_ok();
            if !is_read
                || page_sum(self.digest, &record.key, &bytes.as_mut_slice()[..self.page_bytes]) != record.sum
            {
                damaged += 1;
                continue;
            }
            let to = free.next().expect("no more pages are kept than there are slots");
            self.write(to, record, bytes.as_mut_slice()).map_err(open_error)?;
            *slot = to;
        }
        kept.retain(|(slot, _)| *slot < end);
        Ok(damaged)
    }

    fn write(&self, slot: FileSlot, record: &Record, bytes: &[u8]) -> io::Result<()> {
        write_whole(self.disk, DiskFile::Index, &[0; ENTRY_BYTES], entry_offset(slot))?;
        write_whole(self.disk, DiskFile::Pages, bytes, page_offset(slot, self.slot_bytes))?;
        write_whole(self.disk, DiskFile::Index, &record.encode(self.digest, slot), entry_offset(slot))
    }

    /// Returns the first slot behind the capacity.
    fn end(&self) -> FileSlot {
        FileSlot::new(u32::try_from(self.count).expect("the number of slots was checked"))
    }

    /// Ends the files where the last slot does.
    fn cut(&self) -> Result<()> {
        let end = self.end();
        let ends =
            [(DiskFile::Index, entry_offset(end)), (DiskFile::Pages, page_offset(end, self.slot_bytes))];
        for (file, end) in ends {
            if self.disk.bytes(file).map_err(open_error)? > end {
                self.disk.truncate(file, end).map_err(open_error)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    /// A large index, and pages that are holes.
    #[derive(Debug)]
    struct Sparse {
        index: Mutex<Vec<u8>>,
        pages: u64,
    }

    impl Disk for Sparse {
        fn bytes(&self, file: DiskFile) -> io::Result<u64> {
            Ok(if file == DiskFile::Pages {
                self.pages
            } else {
                to_u64(self.index.lock().expect("no panic").len())
            })
        }

        fn truncate(&self, _file: DiskFile, _bytes: u64) -> io::Result<()> {
            Ok(())
        }

        fn read_at(&self, file: DiskFile, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
            assert_eq!(file, DiskFile::Index, "pages are not read when a store is opened");
            let offset = usize::try_from(offset).expect("an address");
            buffer.copy_from_slice(&self.index.lock().expect("no panic")[offset..][..buffer.len()]);
            Ok(buffer.len())
        }

        fn write_at(&self, file: DiskFile, bytes: &[u8], offset: u64) -> io::Result<usize> {
            assert_eq!(file, DiskFile::Index);
            let offset = usize::try_from(offset).expect("an address");
            self.index.lock().expect("no panic")[offset..][..bytes.len()].copy_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&self) -> io::Result<()> {
            Ok(())
        }
    }

    /// Reads the beginning of each part only, since there are many.
    fn digest(parts: &[&[u8]]) -> [u8; 32] {
        let mut sum = 7_u64;
        for part in parts {
            let (mut word, len) = ([0; 8], part.len().min(8));
            word[..len].copy_from_slice(&part[..len]);
            sum = (sum ^ u64::from_le_bytes(word)).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(23);
        }
        let mut hash = [0; 32];
        hash[..8].copy_from_slice(&sum.to_le_bytes());
        hash
    }

    #[test]
    fn a_million_pages_are_found_by_reading_the_index_alone() {
        const PAGES: u32 = 1_000_000;
        let mut index = header(digest, 4096).to_vec();
        for slot in 0..PAGES {
            let mut key = [0; 32];
            key[..4].copy_from_slice(&slot.wrapping_mul(0x9e37_79b1).to_le_bytes());
            // The last slot was used first.
            let record = Record { key, sum: [0; 16], tick: u64::from(PAGES - slot) };
            index.extend(record.encode(digest, FileSlot::new(slot)));
        }
        // One is damaged, and one is that of another slot.
        index[BLOCK + 64 * 5] ^= 1;
        index.copy_within(BLOCK..BLOCK + 64, BLOCK + 64 * 7);
        let disk = Sparse { index: Mutex::new(index), pages: u64::from(PAGES) * 4096 };
        let (page_bytes, slot_bytes, count) = (4096, 4096, 1_000_000);
        let policy = PolicyKind::Lru;
        let opening = Opening { disk: &disk, digest, page_bytes, slot_bytes, count, policy };
        let mut found = opening.run().expect("a store");
        assert_eq!((found.slots.len(), found.damaged), (999_998, 2));
        let mut first = || found.slots.take(u64::MAX).expect("one of all");
        assert_eq!(
            (first(), first(), first()),
            (FileSlot::new(5), FileSlot::new(7), FileSlot::new(999_999)),
            "free ones, and then that used least recently"
        );
        assert_eq!(found.slots.broken_invariant(), None);
    }
}
