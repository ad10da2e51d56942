//! The store of pages on disks that fail, and in folders that others have, change or remove.

use std::fs;
use std::io::ErrorKind as Io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use kvpool::base::{DType, ErrorKind};
use kvpool::cache::PolicyKind;
use kvpool::memory::{Host, HostRows, Region};
use kvpool::pool::{FileStore, FileStoreConfig, PutAfter, StoreTransfer};
use kvpool::tensor::TensorView;
use kvpool::transfer::{BLOCK, Disk, FileCaching};

use crate::histories::disks::{Fault, MemoryDisk, digest};

const PAGE_BYTES: usize = BLOCK + 5;
const SLOT_BYTES: usize = 2 * BLOCK;

type Key = [u8; 32];

fn config(slots: usize) -> FileStoreConfig {
    FileStoreConfig {
        capacity_bytes: slots * SLOT_BYTES,
        page_bytes: PAGE_BYTES,
        threads: 1,
        queue_bytes: 64 * PAGE_BYTES,
        policy: PolicyKind::Lru,
        digest,
    }
}

fn try_open(disk: &Arc<MemoryDisk>, slots: usize) -> kvpool::base::Result<FileStore> {
    let disk: Arc<dyn Disk> = Arc::<MemoryDisk>::clone(disk);
    FileStore::open("memory", &config(slots), &disk)
}

fn open(disk: &Arc<MemoryDisk>, slots: usize) -> FileStore {
    try_open(disk, slots).unwrap()
}

fn keys(numbers: &[u8]) -> Vec<Key> {
    numbers.iter().map(|&number| [number; 32]).collect()
}

fn rows(count: usize) -> (Arc<Region>, HostRows) {
    let region = Arc::new(Region::new(Arc::new(Host), count.max(1) * PAGE_BYTES).unwrap());
    let rows = rows_of(&region, count, PAGE_BYTES);
    (region, rows)
}

fn rows_of(region: &Arc<Region>, count: usize, row_bytes: usize) -> HostRows {
    let tensor = TensorView::contiguous(Arc::clone(region), 0, DType::U8, &[count, row_bytes]).unwrap();
    // SAFETY: each test waits for the store before it uses the region.
    unsafe { HostRows::of_tensor("rows", &tensor.borrow(), Arc::clone(region) as _) }.unwrap()
}

fn bytes(number: u8) -> Vec<u8> {
    (0..PAGE_BYTES).map(|at| number ^ u8::try_from(at % 251).unwrap()).collect()
}

fn begin_put_after(store: &FileStore, numbers: &[u8], after: PutAfter) -> Arc<StoreTransfer> {
    let (_, rows) = rows(numbers.len());
    for (row, &number) in numbers.iter().enumerate() {
        rows.write(row, &bytes(number));
    }
    store.put(keys(numbers), rows, after).unwrap()
}

fn begin_put(store: &FileStore, numbers: &[u8]) -> Arc<StoreTransfer> {
    begin_put_after(store, numbers, PutAfter::PreviousCall)
}

/// Puts the first pages of a prompt.
fn put_first(store: &FileStore, numbers: &[u8]) -> Vec<bool> {
    finished(&begin_put_after(store, numbers, PutAfter::Nothing))
}

/// Puts pages that follow the page `parent`.
fn put_after(store: &FileStore, parent: u8, numbers: &[u8]) -> Vec<bool> {
    finished(&begin_put_after(store, numbers, PutAfter::Page([parent; 32])))
}

fn finished(transfer: &StoreTransfer) -> Vec<bool> {
    assert!(transfer.wait(Duration::from_secs(60)).unwrap());
    transfer.present().unwrap()
}

fn put(store: &FileStore, numbers: &[u8]) -> Vec<bool> {
    finished(&begin_put(store, numbers))
}

/// The pages that are found, which have their bytes.
fn found(store: &FileStore, numbers: &[u8]) -> Vec<u8> {
    let (region, target) = rows(numbers.len());
    let present = finished(&store.get(keys(numbers), target).unwrap());
    let read = rows_of(&region, numbers.len(), PAGE_BYTES);
    let mut all = Vec::new();
    for (row, &number) in numbers.iter().enumerate().filter(|(row, _)| present[*row]) {
        let mut page = vec![0; PAGE_BYTES];
        read.read(row, &mut page);
        assert_eq!(page, bytes(number), "page {number}");
        all.push(number);
    }
    all
}

fn stat(store: &FileStore, name: &str) -> usize {
    store.stats().unwrap().get(name).unwrap()
}

/// A folder of its own for each test.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("kvpool-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        Self(path)
    }

    fn open(&self, slots: usize) -> kvpool::base::Result<FileStore> {
        FileStore::at(&self.0, &config(slots), FileCaching::Direct)
    }

    fn refusal(&self, config: &FileStoreConfig) -> String {
        let error = FileStore::at(&self.0, config, FileCaching::Direct).map(drop).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config);
        error.to_string()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A run of calls of a store of three pages: 1 and 2 are there before, of which 1 is used last.
fn calls(disk: &Arc<MemoryDisk>) -> Option<FileStore> {
    let store = try_open(disk, 3).ok()?;
    put(&store, &[3, 4]);
    found(&store, &[1, 3, 4]);
    let _ = store.remove(&keys(&[3]));
    put(&store, &[5, 6]);
    Some(store)
}

/// The number of calls that a disk gets, and a disk before them.
fn prepared() -> Arc<MemoryDisk> {
    let disk = Arc::<MemoryDisk>::default();
    let store = open(&disk, 3);
    assert_eq!(put(&store, &[2, 1]), [true, true]);
    found(&store, &[1]);
    drop(store);
    disk
}

fn calls_of_a_run() -> usize {
    let disk = prepared();
    let before = disk.files().calls;
    drop(calls(&disk));
    let calls = disk.files().calls;
    calls - before
}

const ALL: [u8; 6] = [1, 2, 3, 4, 5, 6];

#[test]
fn a_process_killed_at_any_call_leaves_only_right_pages() {
    for nth in 0..calls_of_a_run() {
        for kept in [0, 1, 31, 63, 64, BLOCK - 1, BLOCK, PAGE_BYTES, SLOT_BYTES] {
            let disk = prepared();
            disk.files().fault = Some((nth, Fault::Killed(kept)));
            drop(calls(&disk));
            assert!(disk.files().is_killed, "call {nth}");
            disk.files().is_killed = false;
            let store = open(&disk, 3);
            let there = found(&store, &ALL);
            assert!(there.len() <= 3);
            assert_eq!(
                stat(&store, "pages"),
                there.len(),
                "what is listed is found: call {nth}, {kept} bytes"
            );
            // A page at work, the one evicted for it, and one that was removed.
            assert!(there.len() >= 2 || there.contains(&1), "call {nth}, {kept} bytes: {there:?}");
            assert_eq!(put(&store, &[7]), [true]);
            assert_eq!((found(&store, &[7]), store.broken_invariant()), (vec![7], None));
        }
    }
}

#[test]
fn a_process_killed_when_it_makes_a_store_leaves_one() {
    for kept in [0, 1, 7, 8, 9, 39, 40, 4096] {
        for nth in 0..6 {
            let disk = Arc::<MemoryDisk>::default();
            disk.files().fault = Some((nth, Fault::Killed(kept)));
            drop(try_open(&disk, 3));
            disk.files().is_killed = false;
            disk.files().fault = None;
            let store = open(&disk, 3);
            assert_eq!(put(&store, &[1]), [true]);
        }
    }
}

#[test]
fn every_call_may_fail_once() {
    for nth in 0..calls_of_a_run() {
        for kind in [Io::Other, Io::StorageFull, Io::Interrupted] {
            let disk = prepared();
            disk.files().fault = Some((nth, Fault::Error(kind)));
            let store = calls(&disk);
            assert!(disk.files().fault.is_none(), "call {nth} was made");
            if let Some(store) = store {
                assert_eq!(store.broken_invariant(), None);
                let there = found(&store, &ALL);
                assert!(there.len() >= 2, "call {nth} fails: {there:?}");
                if kind == Io::Interrupted {
                    assert_eq!(stat(&store, "errors"), 0);
                }
                assert_eq!(stat(&store, "errors") > 0, !store.take_notes().is_empty());
                assert_eq!(put(&store, &[7]), [true]);
            }
            let store = open(&disk, 3);
            assert!(found(&store, &[1, 2, 3, 4, 5, 6, 7]).len() >= 2, "call {nth} has failed");
        }
    }
}

#[test]
fn short_reads_and_writes_are_continued() {
    for nth in 0..calls_of_a_run() {
        for most in [1, 63, BLOCK] {
            let disk = prepared();
            disk.files().fault = Some((nth, Fault::Short(most)));
            let store = calls(&disk).unwrap();
            assert_eq!(found(&store, &ALL), [1, 5, 6]);
            assert_eq!((stat(&store, "errors"), stat(&store, "damaged")), (0, 0));
        }
    }
}

#[test]
fn a_file_that_ends_early_has_lost_its_last_pages_only() {
    let disk = prepared();
    let store = open(&disk, 3);
    disk.files().pages.truncate(SLOT_BYTES + 1);
    assert_eq!(found(&store, &[2, 1]), [2]);
    assert_eq!((stat(&store, "damaged"), stat(&store, "misses"), stat(&store, "pages")), (1, 1, 1));
    assert_eq!(put(&store, &[1]), [true]);
    assert_eq!(found(&store, &[2, 1]), [2, 1]);
}

#[test]
fn a_full_disk_evicts_and_then_takes_more() {
    let disk = Arc::<MemoryDisk>::default();
    let store = open(&disk, 100);
    disk.files().space = 3 * SLOT_BYTES;
    assert_eq!(put(&store, &[1, 2, 3]), [true; 3]);
    assert_eq!(put(&store, &[4]), [false]);
    let notes = store.take_notes();
    assert_eq!(notes.len(), 1);
    assert!(notes[0].starts_with("the store in memory cannot write a page: "), "{notes:?}");
    assert_eq!(found(&store, &[1, 2, 3]), [1, 2, 3], "no other is lost");
    for number in 4..=60 {
        assert_eq!(put(&store, &[number]), [true]);
    }
    assert_eq!(found(&store, &[57, 58, 59, 60]), [58, 59, 60]);
    assert_eq!((stat(&store, "errors"), stat(&store, "evicted")), (1, 57));
    disk.files().space = usize::MAX;
    for number in 61..=200 {
        assert_eq!(put(&store, &[number]), [true]);
    }
    assert!(stat(&store, "pages") > 3, "space that is free again is used");
    assert!(store.take_notes().is_empty(), "the same is noted once");
}

#[test]
fn a_page_whose_read_fails_is_missing_and_can_be_put_again() {
    let disk = prepared();
    let store = open(&disk, 3);
    disk.files().fault = Some((0, Fault::Error(Io::Other)));
    assert_eq!(found(&store, &[1, 2]), [2]);
    assert_eq!(store.look_up(&keys(&[1])).unwrap(), 0);
    assert_eq!((stat(&store, "errors"), stat(&store, "damaged")), (1, 0));
    assert!(store.take_notes()[0].contains("cannot read a page"));
    assert_eq!(put(&store, &[1]), [true]);
    assert_eq!(found(&store, &[1, 2]), [1, 2]);
}

#[test]
fn the_last_pages_of_a_call_go_first_and_use_counts() {
    let disk = Arc::<MemoryDisk>::default();
    let store = open(&disk, 4);
    put(&store, &[1, 2, 3, 4]);
    put(&store, &[5]);
    assert_eq!(store.look_up(&keys(&[1, 2, 3, 4])).unwrap(), 3);
    put(&store, &[6]);
    assert_eq!(found(&store, &[2, 1]), [2, 1], "5 was used least recently, and 3 is the end of a prefix");
    put(&store, &[7, 8]);
    assert_eq!(found(&store, &[1, 2, 3, 5, 6, 7, 8]), [1, 2, 7, 8]);
}

/// The number of leading pages of a prompt, without recording a use.
fn leading(store: &FileStore, numbers: &[u8]) -> usize {
    let leading = store.exists(&keys(numbers)).unwrap();
    let found = store.find(&keys(numbers)).unwrap();
    assert_eq!(found.into_iter().take_while(|is_there| *is_there).count(), leading);
    leading
}

fn numbers(begin: u8, count: u8) -> Vec<u8> {
    (begin..begin + count).collect()
}

#[test]
fn the_beginning_of_a_prompt_outlives_its_end_with_any_number_of_threads() {
    for threads in 1..=4 {
        for turn in 0..20 {
            let disk: Arc<dyn Disk> = Arc::<MemoryDisk>::default();
            let config = FileStoreConfig { threads, ..config(24) };
            let store = FileStore::open("memory", &config, &disk).unwrap();
            put_first(&store, &numbers(0, 24));
            assert_eq!(put_first(&store, &numbers(100, 5 + turn % 3)), vec![true; usize::from(5 + turn % 3)]);
            assert_eq!(leading(&store, &numbers(0, 24)), 24 - usize::from(5 + turn % 3), "{threads} threads");
            assert_eq!(store.broken_invariant(), None);
        }
    }
}

#[test]
fn a_prompt_that_is_larger_than_the_store_keeps_its_beginning() {
    for threads in [1, 3] {
        let disk: Arc<dyn Disk> = Arc::<MemoryDisk>::default();
        let config = FileStoreConfig { threads, ..config(8) };
        let store = FileStore::open("memory", &config, &disk).unwrap();
        let stored = put_first(&store, &numbers(0, 16));
        assert_eq!(stored, [vec![true; 8], vec![false; 8]].concat(), "{threads} threads");
        assert_eq!((leading(&store, &numbers(0, 16)), stat(&store, "dropped")), (8, 8));
        // Also in parts, of which the last ones do not fit.
        store.clear().unwrap();
        put_first(&store, &numbers(0, 5));
        assert_eq!(put_after(&store, 4, &numbers(5, 5)), [true, true, true, false, false]);
        assert_eq!(put_after(&store, 9, &numbers(10, 5)), [false; 5], "their beginning is not there");
        assert_eq!(leading(&store, &numbers(0, 15)), 8);
        assert_eq!(put_first(&store, &numbers(100, 2)), [true, true], "another prompt finds room");
        assert_eq!(leading(&store, &numbers(0, 15)), 6);
    }
}

#[test]
fn the_parts_of_a_prompt_keep_their_order_whatever_comes_between_them() {
    let disk = Arc::<MemoryDisk>::default();
    let store = open(&disk, 16);
    // Two prompts in turns.
    put_first(&store, &numbers(0, 2));
    put_first(&store, &numbers(50, 2));
    for part in 0..3 {
        put_after(&store, 2 * part + 1, &numbers(2 * part + 2, 2));
        put_after(&store, 2 * part + 51, &numbers(2 * part + 52, 2));
    }
    drop(store);
    let store = open(&disk, 16);
    for other in 0..12 {
        put_first(&store, &[100 + other]);
        for prompt in [0, 50] {
            let there = store.find(&keys(&numbers(prompt, 8))).unwrap();
            let count = there.iter().filter(|is_there| **is_there).count();
            assert_eq!(leading(&store, &numbers(prompt, 8)), count, "no page is behind a hole: {there:?}");
        }
    }
    assert_eq!(leading(&store, &numbers(50, 8)), 4, "the other prompt was put first");
}

#[test]
fn calls_between_look_ups_are_parts_of_one_prompt() {
    let store = open(&Arc::default(), 16);
    for part in 0..4 {
        put(&store, &numbers(4 * part, 4));
    }
    put(&store, &numbers(100, 4));
    assert_eq!((leading(&store, &numbers(0, 16)), leading(&store, &numbers(100, 4))), (12, 4));
    // A look-up finds the beginning, and the next part is behind it.
    store.clear().unwrap();
    for part in 0..3_u8 {
        let before = usize::from(4 * part);
        assert_eq!(store.look_up(&keys(&numbers(0, 12))).unwrap(), before);
        put(&store, &numbers(4 * part, 4));
    }
    assert_eq!(store.look_up(&keys(&numbers(100, 4))).unwrap(), 0);
    put(&store, &numbers(100, 4));
    assert_eq!(store.look_up(&keys(&numbers(150, 6))).unwrap(), 0);
    put(&store, &numbers(150, 6));
    assert_eq!(leading(&store, &numbers(0, 12)), 6);
    assert_eq!((leading(&store, &numbers(100, 4)), leading(&store, &numbers(150, 6))), (4, 6));
}

#[test]
fn a_touch_counts_for_stored_and_queued_pages() {
    let disk = Arc::<MemoryDisk>::default();
    let store = open(&disk, 6);
    put_first(&store, &numbers(0, 3));
    put_first(&store, &numbers(50, 3));
    assert_eq!(store.touch(&keys(&numbers(0, 4))).unwrap(), [true, true, true, false]);
    put_first(&store, &numbers(100, 2));
    assert_eq!((leading(&store, &numbers(0, 3)), leading(&store, &numbers(50, 3))), (3, 1));
    store.clear().unwrap();
    // No thread gets on while the disk is locked.
    let held = disk.files();
    let first = begin_put_after(&store, &numbers(0, 3), PutAfter::Nothing);
    let second = begin_put_after(&store, &numbers(50, 3), PutAfter::Nothing);
    assert_eq!(store.touch(&keys(&numbers(0, 3))).unwrap(), [false; 3], "not yet");
    drop(held);
    assert_eq!((finished(&first), finished(&second)), (vec![true; 3], vec![true; 3]));
    put_first(&store, &numbers(100, 2));
    assert_eq!((leading(&store, &numbers(0, 3)), leading(&store, &numbers(50, 3))), (3, 1));
    assert_eq!(store.broken_invariant(), None);
}

#[test]
fn a_page_that_finds_the_disk_full_takes_the_place_of_another() {
    let disk = Arc::<MemoryDisk>::default();
    let store = open(&disk, 500);
    disk.files().space = 10 * SLOT_BYTES;
    for turn in 0..60_u8 {
        let prompt = numbers(4 * turn, 4);
        assert_eq!(put_first(&store, &prompt), [true; 4], "turn {turn}");
    }
    let errors = stat(&store, "errors");
    assert!((2..=5).contains(&errors), "the disk is tried from time to time: {errors}");
    let notes = store.take_notes();
    assert_eq!(notes.len(), 1, "{notes:?}");
    assert!(notes[0].contains("it goes on with 10 of 500 pages"), "{notes:?}");
}

#[test]
fn a_moment_without_space_does_not_limit_the_store_for_good() {
    let disk = Arc::<MemoryDisk>::default();
    let store = open(&disk, 250);
    put_first(&store, &[0, 1]);
    disk.files().space = 2 * SLOT_BYTES;
    assert_eq!(put_first(&store, &[2]), [true]);
    disk.files().space = usize::MAX;
    for number in 3..=250 {
        assert_eq!(put_first(&store, &[number]), [true]);
    }
    assert!(store.len().unwrap() > 180, "{}", store.len().unwrap());
    assert_eq!(stat(&store, "errors"), 1);
}

#[test]
fn pages_without_an_index_are_a_new_store_with_a_warning() {
    // What a power cut leaves of an index that was not flushed.
    let zeros = |bytes: &[u8]| vec![0; bytes.len()];
    let cut: [fn(&[u8]) -> usize; 4] = [|_| 0, |_| 8, |_| 100, |_| BLOCK];
    for (number, cut) in cut.into_iter().enumerate() {
        for is_zeroed in [false, true] {
            let disk = prepared();
            let pages = disk.files().pages.len();
            {
                let mut files = disk.files();
                let keep = cut(&files.index);
                files.index = if is_zeroed { zeros(&files.index) } else { files.index[..keep].to_vec() };
                if is_zeroed && number > 0 {
                    // The header alone.
                    let entry = prepared().files().index[BLOCK..].to_vec();
                    files.index.splice(BLOCK.., entry);
                }
            }
            let store = open(&disk, 3);
            if disk.files().index.len() == BLOCK && cut(&[]) == BLOCK && !is_zeroed {
                // The header is whole, and no entry is there.
                assert!(store.is_empty().unwrap() && store.take_notes().is_empty());
                continue;
            }
            let [note] = store.take_notes().try_into().unwrap();
            assert!(note.starts_with("the store in memory has lost its index"), "{note}");
            assert!(note.contains(&format!("{pages} bytes")), "{note}");
            assert!(store.is_empty().unwrap());
            assert_eq!((put(&store, &[1]), found(&store, &[1, 2])), (vec![true], vec![1]));
            drop(store);
            let store = open(&disk, 3);
            assert_eq!((found(&store, &[1]), store.take_notes()), (vec![1], vec![]));
        }
    }
}

#[test]
fn the_header_of_a_new_store_is_flushed() {
    let disk = Arc::<MemoryDisk>::default();
    let store = open(&disk, 3);
    let flushed = disk.files().flushed.clone();
    assert_eq!((flushed.len(), &flushed), (BLOCK, &disk.files().index));
    put(&store, &[1]);
    drop(store);
    assert!(open(&disk, 3).take_notes().is_empty());
    // Another file of this name is not touched.
    let other = Arc::<MemoryDisk>::default();
    other.files().index = [vec![0; BLOCK], b"precious".repeat(8)].concat();
    other.files().pages = vec![7; SLOT_BYTES];
    let error = try_open(&other, 3).map(drop).unwrap_err();
    assert_eq!(error.to_string(), "memory: its file index is not that of a store");
    assert_eq!(other.files().pages, vec![7; SLOT_BYTES]);
}

#[test]
fn the_order_of_use_survives_the_process() {
    let disk = Arc::<MemoryDisk>::default();
    let store = open(&disk, 4);
    put_first(&store, &[1, 2]);
    put_first(&store, &[3, 4]);
    assert_eq!(found(&store, &[2]), [2]);
    drop(store);
    let store = open(&disk, 4);
    put(&store, &[5, 6]);
    assert_eq!(found(&store, &[1, 2, 3, 4, 5, 6]), [2, 3, 5, 6]);
}

#[test]
fn another_capacity_keeps_the_pages_used_last() {
    let disk = Arc::<MemoryDisk>::default();
    let store = open(&disk, 6);
    for number in ALL {
        put_first(&store, &[number]);
    }
    found(&store, &[1]);
    drop(store);
    let store = open(&disk, 3);
    assert_eq!(found(&store, &ALL), [1, 5, 6], "two of them lay behind");
    assert_eq!(stat(&store, "capacity"), 3);
    drop(store);
    assert_eq!(disk.files().pages.len(), 3 * SLOT_BYTES);
    assert_eq!(disk.files().index.len(), BLOCK + 3 * 64);
    let store = open(&disk, 5);
    put(&store, &[7, 8]);
    assert_eq!(found(&store, &[1, 5, 6, 7, 8]), [1, 5, 6, 7, 8]);
}

#[test]
fn a_process_killed_when_a_store_becomes_smaller_loses_no_more() {
    for nth in 0..40 {
        for kept in [0, 40, 64, BLOCK] {
            let disk = Arc::<MemoryDisk>::default();
            let store = open(&disk, 6);
            for number in ALL {
                put_first(&store, &[number]);
            }
            drop(store);
            disk.files().fault = Some((nth, Fault::Killed(kept)));
            drop(try_open(&disk, 3));
            disk.files().is_killed = false;
            disk.files().fault = None;
            let store = open(&disk, 3);
            assert_eq!(found(&store, &ALL), [4, 5, 6], "call {nth}, {kept} bytes");
            assert_eq!(store.broken_invariant(), None);
        }
    }
}

#[test]
fn removed_pages_do_not_come_back() {
    let disk = prepared();
    let store = open(&disk, 3);
    assert_eq!(store.remove(&keys(&[9, 2, 2])).unwrap(), 1);
    drop(store);
    let store = open(&disk, 3);
    assert_eq!(found(&store, &[1, 2]), [1]);
    assert_eq!(store.clear().unwrap(), 1);
    drop(store);
    assert!(open(&disk, 3).is_empty().unwrap());
}

#[test]
fn pages_beyond_the_queue_are_dropped() {
    let disk = Arc::<MemoryDisk>::default();
    let config = FileStoreConfig { queue_bytes: 2 * PAGE_BYTES, ..config(8) };
    let store =
        FileStore::open("memory", &config, &(Arc::<MemoryDisk>::clone(&disk) as Arc<dyn Disk>)).unwrap();
    // No thread gets on while the disk is locked.
    let held = disk.files();
    let first = begin_put(&store, &[1, 2, 3]);
    let second = begin_put(&store, &[1, 4]);
    assert_eq!((first.query().unwrap(), stat(&store, "queued"), stat(&store, "dropped")), (false, 2, 2));
    assert_eq!(finished(&second), [false, false], "it does not vouch for another's page");
    assert!(!first.wait(Duration::from_millis(1)).unwrap());
    assert_eq!(first.leading().unwrap(), 0);
    drop(held);
    assert_eq!((finished(&first), first.leading().unwrap()), (vec![true, true, false], 2));
    assert_eq!(put(&store, &[3, 1]), [true, true]);
}

#[test]
fn a_close_completes_queued_pages_and_a_drop_discards_them() {
    let disk = Arc::<MemoryDisk>::default();
    let store = open(&disk, 40);
    let numbers: Vec<u8> = (1..=40).collect();
    let transfer = begin_put(&store, &numbers);
    assert!(store.close(Duration::from_secs(60)).unwrap());
    assert_eq!(transfer.leading().unwrap(), 40);
    let error = store.exists(&[]).unwrap_err();
    assert_eq!(
        (error.kind(), error.to_string().as_str()),
        (ErrorKind::State, "the store in memory is closed")
    );
    assert!(store.remove(&[]).is_err() && store.clear().is_err());
    assert!(store.close(Duration::ZERO).unwrap(), "again");
    assert_eq!(store.len().unwrap(), 40);
    let store = open(&disk, 40);
    store.clear().unwrap();
    let held = disk.files();
    let transfer = begin_put(&store, &numbers);
    let dropping = std::thread::spawn(move || drop(store));
    drop(held);
    dropping.join().unwrap();
    assert!(transfer.query().unwrap(), "nobody waits for ever");
    let stored = transfer.present().unwrap().into_iter().filter(|&is_stored| is_stored).count();
    assert_eq!(open(&disk, 40).len().unwrap(), stored);
}

#[test]
fn sizes_that_do_not_fit_are_refused() {
    let of = |change: fn(&mut FileStoreConfig)| {
        let mut config = config(3);
        change(&mut config);
        let disk = Arc::<MemoryDisk>::default();
        let error = FileStore::open("memory", &config, &(disk as Arc<dyn Disk>)).map(drop).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config);
        error.to_string()
    };
    assert!(of(|config| config.page_bytes = 0).contains("page_bytes is 0"));
    assert!(of(|config| config.threads = 0).contains("threads is 0"));
    assert!(of(|config| config.capacity_bytes = 8191).contains("capacity_bytes is 8191, too few"));
    assert!(of(|config| config.page_bytes = usize::MAX).contains("too few for a page"));
    assert!(of(|config| config.capacity_bytes = usize::MAX).contains("the most is"));
    assert!(of(|config| config.queue_bytes = 4100).contains("queue_bytes is 4100"));
}

#[test]
fn a_renewed_entry_that_cannot_be_written_is_an_error() {
    let disk = Arc::<MemoryDisk>::default();
    let store = open(&disk, 3);
    put(&store, &[1, 2, 3]);
    // The use of a page that was put long ago is written to its entry.
    assert_eq!(found(&store, &[2, 3]), [2, 3]);
    let before = stat(&store, "errors");
    disk.files().fault = Some((1, Fault::Error(Io::Other)));
    assert_eq!(found(&store, &[1]), [1]);
    assert!(disk.files().fault.is_none(), "the entry was to be written");
    assert_eq!((before, stat(&store, "errors")), (0, 1));
    assert_eq!(found(&store, &[1, 2, 3]), [1, 2, 3], "the earlier entry stays valid");
}

#[test]
fn a_store_is_closed_when_no_call_uses_its_files() {
    let disk = Arc::<MemoryDisk>::default();
    let store = open(&disk, 3);
    put(&store, &[1, 2, 3]);
    std::thread::scope(|scope| {
        // The call waits for the files.
        let files = disk.files();
        let clearing = scope.spawn(|| store.clear().unwrap());
        while store.len().unwrap() > 0 {
            std::thread::yield_now();
        }
        assert!(!store.close(Duration::from_millis(1)).unwrap());
        drop(files);
        assert!(store.close(Duration::from_secs(60)).unwrap());
        assert_eq!(clearing.join().unwrap(), 3);
    });
    assert_eq!(Arc::strong_count(&disk), 1);
}

#[test]
fn rows_that_do_not_fit_are_refused() {
    let store = open(&Arc::default(), 3);
    let error = store.put(keys(&[1]), rows(2).1, PutAfter::PreviousCall).unwrap_err();
    assert_eq!(error.to_string(), "there are 1 keys for 2 pages");
    let region = Arc::new(Region::new(Arc::new(Host), 64).unwrap());
    let error = store.get(keys(&[1]), rows_of(&region, 1, 64)).unwrap_err();
    assert_eq!(error.to_string(), format!("pages have 64 bytes each, those of the store {PAGE_BYTES}"));
}

#[test]
fn a_folder_is_for_one_store_at_a_time() {
    let scratch = Scratch::new("one-store");
    let store = scratch.open(3).unwrap();
    put(&store, &[1]);
    let path = scratch.0.display().to_string();
    let text = scratch.refusal(&config(3));
    assert_eq!(text, format!("{path} is in use by process {}, this one", std::process::id()));
    assert_eq!(scratch.refusal(&config(3)), text, "the lock has survived the attempt");
    drop(store);
    assert_eq!(found(&scratch.open(3).unwrap(), &[1]), [1]);
}

#[test]
fn another_store_in_a_folder_is_named_with_both_numbers() {
    let scratch = Scratch::new("other-store");
    let store = scratch.open(3).unwrap();
    put(&store, &[1]);
    drop(store);
    let path = scratch.0.display().to_string();
    let other = FileStoreConfig { page_bytes: 4096, ..config(3) };
    let text = format!("{path}: it has pages of {PAGE_BYTES} bytes, and page_bytes is 4096");
    assert_eq!(scratch.refusal(&other), text);
    let index = scratch.0.join("index");
    let right = fs::read(&index).unwrap();
    let refusal = |at: usize, byte: u8| {
        let mut wrong = right.clone();
        wrong[at] = byte;
        fs::write(&index, &wrong).unwrap();
        let text = scratch.refusal(&config(3));
        assert_eq!(fs::read(&index).unwrap(), wrong, "nothing is changed");
        text
    };
    assert_eq!(refusal(8, 9), format!("{path}: its layout has version 9, this one reads version 1"));
    assert_eq!(refusal(0, b'K'), format!("{path}: its file index is not that of a store"));
    assert_eq!(refusal(17, 1), format!("{path}: the header of its file index is damaged"));
    fs::write(&index, right).unwrap();
    assert_eq!(found(&scratch.open(3).unwrap(), &[1]), [1]);
}

#[test]
fn a_path_that_cannot_be_a_folder_is_refused() {
    let scratch = Scratch::new("no-folder");
    fs::write(&scratch.0, "a file").unwrap();
    let below = Scratch(scratch.0.join("below"));
    for scratch in [&scratch, &below] {
        let text = scratch.refusal(&config(3));
        assert!(text.starts_with(&format!("{} cannot be used: ", scratch.0.display())), "{text}");
    }
    fs::remove_file(&scratch.0).unwrap();
    let elsewhere = Scratch::new("elsewhere");
    fs::create_dir_all(&scratch.0).unwrap();
    fs::write(&elsewhere.0, "precious").unwrap();
    std::os::unix::fs::symlink(&elsewhere.0, scratch.0.join("pages")).unwrap();
    assert!(scratch.refusal(&config(3)).contains("cannot be used"), "links are not followed");
    assert_eq!(fs::read_to_string(&elsewhere.0).unwrap(), "precious");
    fs::remove_file(&elsewhere.0).unwrap();
}

#[test]
fn a_removed_folder_still_serves_reads_but_rejects_writes() {
    let scratch = Scratch::new("gone");
    let store = scratch.open(3).unwrap();
    put(&store, &[1]);
    fs::remove_dir_all(&scratch.0).unwrap();
    assert_eq!(put(&store, &[2]), [false]);
    assert_eq!(found(&store, &[1, 2]), [1]);
    let path = scratch.0.display();
    assert_eq!(
        store.take_notes(),
        [format!("the store in {path} cannot write a page: its files were removed")]
    );
    let again = scratch.open(3).unwrap();
    assert_eq!((put(&again, &[2]), found(&again, &[1, 2])), (vec![true], vec![2]));
}

#[test]
fn only_the_owner_has_access_to_the_files() {
    use std::os::unix::fs::PermissionsExt;
    let scratch = Scratch::new("access");
    drop(scratch.open(3).unwrap());
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&scratch.0), 0o700);
    for name in ["index", "pages", "lock"] {
        assert_eq!(mode(&scratch.0.join(name)), 0o600);
    }
}

#[test]
fn access_of_other_users_is_a_warning() {
    use std::os::unix::fs::PermissionsExt;
    let scratch = Scratch::new("others");
    let set = |path: &Path, mode: u32| fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    drop(scratch.open(3).unwrap());
    let warnings = || scratch.open(3).unwrap().take_notes();
    assert!(warnings().is_empty());
    set(&scratch.0, 0o755);
    assert!(warnings().is_empty(), "the names of its files are no secret");
    set(&scratch.0, 0o770);
    set(&scratch.0.join("pages"), 0o640);
    let path = scratch.0.display();
    let risk = "who may read the pages of the store, or put others in their place";
    assert_eq!(
        warnings(),
        [
            format!("{path} is open to other users, {risk}: its mode is 770"),
            format!("{path}/pages is open to other users, {risk}: its mode is 640"),
        ]
    );
}

#[test]
fn threads_share_a_store() {
    let scratch = Scratch::new("threads");
    let config = FileStoreConfig { threads: 3, ..config(16) };
    let store = FileStore::at(&scratch.0, &config, FileCaching::Direct).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..4_u8 {
            let store = &store;
            scope.spawn(move || {
                for turn in 0..60_u8 {
                    let numbers: Vec<u8> = (0..4).map(|at| (thread * 7 + turn * 3 + at) % 24).collect();
                    match turn % 8 {
                        7 => drop(store.remove(&keys(&numbers)).unwrap()),
                        6 => assert!(store.exists(&keys(&numbers)).unwrap() <= 4),
                        turn if turn % 2 == 0 => drop(put(store, &numbers)),
                        _ => drop(found(store, &numbers)),
                    }
                }
            });
        }
    });
    assert_eq!(store.broken_invariant(), None);
    assert_eq!((stat(&store, "damaged"), stat(&store, "errors"), stat(&store, "queued")), (0, 0, 0));
    let there = found(&store, &(0..24).collect::<Vec<u8>>());
    drop(store);
    let store = FileStore::at(&scratch.0, &config, FileCaching::Cached).unwrap();
    assert_eq!(found(&store, &(0..24).collect::<Vec<u8>>()), there);
}
