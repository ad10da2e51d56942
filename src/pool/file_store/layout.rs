//! The bytes of a store's files: a header, and an entry for each slot.
//!
//! Bytes from a file are used only if their checksum is right.

use crate::base::{Error, Id, Result, id, widen};
use crate::cache::{Digest, PageHash};
use crate::transfer::{BLOCK, to_u64};

/// Bytes of an entry. A block is a whole number of them, so that none lies in two.
pub(super) const ENTRY_BYTES: usize = 64;

/// The offset where the entries begin.
const ENTRIES: usize = BLOCK;

const MAGIC: &[u8; 8] = b"kvpoolFS";

/// The layout that this version reads and writes.
const VERSION: u32 = 1;

/// Bytes of the fields of a header, of the fields that its checksum covers, and of the checksum.
const HEADER_BYTES: usize = 40;
const HEADER_SAYS: usize = 24;

/// A store writes no ticks from this value on.
const END_OF_TICKS: u64 = 1 << 62;

/// The checksum of a page: of its key and its bytes.
pub(super) type PageSum = [u8; 16];

pub(super) fn page_sum(digest: Digest, key: &PageHash, bytes: &[u8]) -> PageSum {
    first(digest(&[b"page", key, bytes]))
}

fn first<const N: usize>(hash: PageHash) -> [u8; N] {
    *hash.first_chunk().expect("a hash has 32 bytes")
}

/// The facts that a store keeps of a page, in memory and in its entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Record {
    pub(super) key: PageHash,
    pub(super) sum: PageSum,
    /// Later uses have larger ones.
    pub(super) tick: u64,
}

id!(
    /// A place for one page in the files of a store. There may be more of them than indices fit int32.
    pub(super) FileSlot,
    "slot of a file"
);

/// Returns the offset of a slot's entry in the index.
pub(super) fn entry_offset(slot: FileSlot) -> u64 {
    to_u64(ENTRIES + widen(slot.number()) * ENTRY_BYTES)
}

/// Returns the offset of a slot's page.
pub(super) fn page_offset(slot: FileSlot, slot_bytes: usize) -> u64 {
    u64::from(slot.number()) * to_u64(slot_bytes)
}

impl Record {
    /// Returns the entry of `slot`.
    pub(super) fn encode(&self, digest: Digest, slot: FileSlot) -> [u8; ENTRY_BYTES] {
        let mut entry = [0; ENTRY_BYTES];
        entry[..32].copy_from_slice(&self.key);
        entry[32..48].copy_from_slice(&self.sum);
        entry[48..56].copy_from_slice(&self.tick.to_le_bytes());
        let sum: [u8; 8] = entry_sum(digest, slot, &entry);
        entry[56..].copy_from_slice(&sum);
        entry
    }

    /// Returns the record in the entry of `slot`, if it is whole.
    pub(super) fn decode(digest: Digest, slot: FileSlot, entry: &[u8; ENTRY_BYTES]) -> Option<Self> {
        let tick = u64::from_le_bytes(*entry[48..].first_chunk().expect("16 bytes"));
        let key = *entry.first_chunk().expect("64 bytes");
        let sum = *entry[32..].first_chunk().expect("32 bytes");
        let is_whole = entry[56..] == entry_sum(digest, slot, entry) && tick < END_OF_TICKS;
        is_whole.then_some(Self { key, sum, tick })
    }
}

fn entry_sum(digest: Digest, slot: FileSlot, entry: &[u8; ENTRY_BYTES]) -> [u8; 8] {
    first(digest(&[b"slot", &slot.number().to_le_bytes(), &entry[..56]]))
}

/// Returns the first block of the index of a store of pages of `page_bytes`.
pub(super) fn header(digest: Digest, page_bytes: usize) -> [u8; ENTRIES] {
    let mut block = [0; ENTRIES];
    block[..8].copy_from_slice(MAGIC);
    block[8..12].copy_from_slice(&VERSION.to_le_bytes());
    block[16..24].copy_from_slice(&to_u64(page_bytes).to_le_bytes());
    let sum: [u8; 16] = first(digest(&[b"head", &block[..HEADER_SAYS]]));
    block[HEADER_SAYS..HEADER_BYTES].copy_from_slice(&sum);
    block
}

/// The state of a header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Header {
    /// It is that of a store of such pages.
    Whole,
    /// It was not written, or in part: the process was killed, or the power was lost.
    Begun,
}

/// Checks that `block` is the header of a store of pages of `page_bytes`, or the beginning of one.
pub(super) fn check_header(digest: Digest, page_bytes: usize, block: &[u8]) -> Result<Header> {
    let expected = header(digest, page_bytes);
    if block == expected {
        return Ok(Header::Whole);
    }
    let written = block.iter().rposition(|&byte| byte != 0).map_or(&[][..], |last| &block[..=last]);
    let is_begun = written.len() < HEADER_BYTES && MAGIC.starts_with(&written[..written.len().min(8)]);
    if is_begun || expected.starts_with(written) {
        return Ok(Header::Begun);
    }
    if block.len() < HEADER_BYTES || block[..8] != *MAGIC {
        return Err(Error::config("its file index is not that of a store"));
    }
    let version = u32::from_le_bytes(*block[8..].first_chunk().expect("a header"));
    if version != VERSION {
        return Err(Error::config(format!(
            "its layout has version {version}, this one reads version {VERSION}"
        )));
    }
    let sum: [u8; 16] = first(digest(&[b"head", &block[..HEADER_SAYS]]));
    let theirs = u64::from_le_bytes(*block[16..].first_chunk().expect("a header"));
    if block[HEADER_SAYS..HEADER_BYTES] == sum && theirs != to_u64(page_bytes) {
        return Err(Error::config(format!("it has pages of {theirs} bytes, and page_bytes is {page_bytes}")));
    }
    Err(Error::config("the header of its file index is damaged"))
}
