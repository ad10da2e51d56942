//! The store of pages: a page that is found has the bytes that were put, whatever happens to the disk, and
//! the pages of the prompt used least recently are evicted first, the last one before the others. By a policy, the
//! last one of the prompt goes that comes first there.

use std::cmp::Reverse;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use kvpool::base::{DType, ErrorKind};
use kvpool::cache::PolicyKind;
use kvpool::memory::{HostRows, Region};
use kvpool::pool::{FileStore, FileStoreConfig, PutAfter};
use kvpool::tensor::TensorView;
use kvpool::transfer::Disk;

use super::disks::{Fault, MemoryDisk, digest};
use super::{Source, host};

const BLOCK: usize = 4096;
const PAGE_BYTES: usize = 100;
const KEYS: usize = 12;
/// Pages of a call.
const MOST: usize = 5;

type Key = [u8; 32];

/// The key of no page.
const ABSENT: Key = [255; 32];

/// The number of a prompt, and the place of a page in it.
type Rank = (usize, Reverse<usize>);

#[derive(Clone, Copy)]
struct Page {
    number: usize,
    fill: u8,
    rank: Rank,
    uses: usize,
    used: usize,
}

impl Page {
    fn new(number: usize, fill: u8, rank: Rank) -> Self {
        Self { number, fill, rank, uses: 1, used: 0 }
    }
}

struct Model {
    /// The pages, in any order. The one with the smallest rank is evicted first.
    pages: Vec<Page>,
    slots: usize,
    prompts: usize,
    /// The prompt that the next call may continue, and its pages so far.
    last: Option<(usize, usize)>,
    policy: PolicyKind,
    /// The time in pages, and those that were looked up and whose time has passed, but that were not used yet.
    now: usize,
    ahead: usize,
}

struct World {
    disk: Arc<MemoryDisk>,
    store: Option<FileStore>,
    region: Arc<Region>,
    model: Model,
}

fn key(number: usize) -> Key {
    let mut key = [u8::try_from(number).expect("few keys"); 32];
    key[31] = 1;
    key
}

fn keys(numbers: &[usize]) -> Vec<Key> {
    numbers.iter().map(|&number| key(number)).collect()
}

/// The bytes of a page: no two neighbours are equal, and no two pages.
fn bytes(number: usize, fill: u8) -> Vec<u8> {
    let number = u8::try_from(number).expect("few keys");
    (0..PAGE_BYTES)
        .map(|at| fill.wrapping_add(u8::try_from(at).expect("a short page")) ^ (number << 3))
        .collect()
}

pub(super) fn run(source: &mut Source<'_>) {
    let region = Arc::new(Region::new(host(), MOST.max(KEYS) * PAGE_BYTES).expect("memory"));
    let (slots, policy) = (1 + source.below(8), source.of(&[PolicyKind::Lru, PolicyKind::Lfu]));
    let model = Model { pages: Vec::new(), slots, prompts: 0, last: None, policy, now: 0, ahead: 0 };
    let mut world = World { disk: Arc::default(), store: None, region, model };
    world.open().expect("a new disk");
    while source.next_step() {
        step(source, &mut world);
        let store = world.store.as_ref().expect("an open store");
        assert_eq!(store.broken_invariant(), None);
        assert_eq!(store.len().expect("an open store"), world.model.pages.len());
        assert!(world.model.pages.iter().all(|page| world.has(page.number)));
        assert!(world.model.pages.len() <= world.model.slots);
    }
}

impl Model {
    fn find(&self, number: usize) -> Option<usize> {
        self.pages.iter().position(|page| page.number == number)
    }

    /// Records that a prompt of so many pages is looked up.
    fn begin_request(&mut self, pages: usize) {
        self.now += pages;
        self.ahead = pages;
    }

    /// Lets the time of a page pass.
    fn pass(&mut self) {
        if self.ahead > 0 {
            self.ahead -= 1;
        } else {
            self.now += 1;
        }
    }

    /// Records a use of a page. Several at one time count as one.
    fn record_use(&mut self, at: usize) {
        if self.now > self.pages[at].used {
            self.pass();
            self.pages[at].used = self.now;
            self.pages[at].uses += 1;
        }
    }

    /// Records a look-up of pages that are there or not. The first one is evicted last.
    fn touch(&mut self, numbers: &[usize]) {
        self.prompts += 1;
        let found: Vec<usize> = numbers.iter().filter_map(|&number| self.find(number)).collect();
        for (page, &at) in found.iter().enumerate().rev() {
            self.pages[at].rank = self.pages[at].rank.max((self.prompts, Reverse(page)));
            self.record_use(at);
        }
        self.last = (!found.is_empty()).then_some((self.prompts, found.len()));
    }

    /// Returns the pages of which one is evicted for a page with this rank.
    fn victims(&self, rank: Rank) -> Vec<usize> {
        let ranks = || self.pages.iter().map(|page| page.rank);
        let is_last = |page: &Page| ranks().filter(|rank| rank.0 == page.rank.0).min() == Some(page.rank);
        let may_go = |page: &Page| is_last(page) && page.rank < rank;
        // Of several, those that are least by this.
        let order = |page: &Page| match self.policy {
            PolicyKind::Lru => (page.rank.0, 0),
            _ => (page.uses, page.used),
        };
        let least = self.pages.iter().filter(|page| may_go(page)).map(order).min();
        let is_first = |&at: &usize| may_go(&self.pages[at]) && Some(order(&self.pages[at])) == least;
        (0..self.pages.len()).filter(is_first).collect()
    }

    /// Puts those that are not there, where `is_gone` says which of several pages was evicted. Returns them.
    fn put(
        &mut self,
        numbers: &[usize],
        fill: u8,
        after: PutAfter,
        is_gone: impl Fn(usize) -> bool,
    ) -> Vec<usize> {
        let (prompt, begin) = match self.last {
            Some((prompt, begin))
                if after == PutAfter::PreviousCall && begin + numbers.len() <= self.slots =>
            {
                (prompt, begin)
            }
            _ => {
                self.prompts += 1;
                (self.prompts, 0)
            }
        };
        self.last = Some((prompt, begin + numbers.len()));
        let mut new: Vec<Page> = Vec::new();
        for (at, &number) in numbers.iter().enumerate() {
            let rank = (prompt, Reverse(begin + at));
            if let Some(known) = self.find(number) {
                if self.pages[known].rank < rank {
                    self.pages[known].rank = rank;
                    self.record_use(known);
                }
            } else if new.iter().all(|page| page.number != number) {
                new.push(Page::new(number, fill, rank));
            }
        }
        let mut put = Vec::new();
        for mut page in new {
            if self.pages.len() == self.slots {
                let victims = self.victims(page.rank);
                let gone = victims.iter().find(|&&at| is_gone(self.pages[at].number));
                let Some(&gone) = gone.or(victims.first()) else { continue };
                self.pages.swap_remove(gone);
            }
            self.pass();
            page.used = self.now;
            put.push(page.number);
            self.pages.push(page);
        }
        put
    }
}

impl World {
    fn open(&mut self) -> kvpool::base::Result<()> {
        let config = FileStoreConfig {
            capacity_bytes: self.model.slots * BLOCK + 7,
            page_bytes: PAGE_BYTES,
            threads: 1,
            queue_bytes: MOST * PAGE_BYTES,
            policy: self.model.policy,
            digest,
        };
        let disk: Arc<dyn Disk> = Arc::<MemoryDisk>::clone(&self.disk);
        self.store = Some(FileStore::open("memory", &config, &disk)?);
        Ok(())
    }

    fn store(&self) -> &FileStore {
        self.store.as_ref().expect("an open store")
    }

    fn has(&self, number: usize) -> bool {
        self.store().find(&[key(number)]).expect("an open store")[0]
    }

    fn rows(&self, count: usize) -> HostRows {
        let region = Arc::clone(&self.region);
        let tensor = TensorView::contiguous(region, 0, DType::U8, &[count, PAGE_BYTES]).expect("enough rows");
        // SAFETY: every call waits for the store before the region is used again.
        unsafe { HostRows::of_tensor("rows", &tensor.borrow(), Arc::clone(&self.region) as _) }.expect("rows")
    }

    fn put(&self, numbers: &[usize], fill: u8, after: PutAfter) -> Vec<bool> {
        let rows = self.rows(numbers.len());
        for (row, &number) in numbers.iter().enumerate() {
            rows.write(row, &bytes(number, fill));
        }
        let put = self.store().put(keys(numbers), rows, after).expect("an open store");
        assert!(put.wait(Duration::from_secs(60)).expect("this process"));
        put.present().expect("this process")
    }

    /// The bytes that are found of pages.
    fn get(&self, numbers: &[usize]) -> Vec<Option<Vec<u8>>> {
        let rows = self.rows(numbers.len());
        let get = self.store().get(keys(numbers), rows).expect("an open store");
        assert!(get.wait(Duration::from_secs(60)).expect("this process"));
        let present = get.present().expect("this process");
        let rows = self.rows(numbers.len());
        let read = |(row, is_present)| {
            let mut page = vec![0; PAGE_BYTES];
            rows.read(row, &mut page);
            Some(page).filter(|_| is_present)
        };
        present.into_iter().enumerate().map(read).collect()
    }

    /// Checks that what is found is right.
    fn check(&self) {
        for &Page { number, fill, .. } in &self.model.pages {
            if let Some(page) = self.get(&[number]).remove(0) {
                assert_eq!(page, bytes(number, fill), "page {number}");
            }
        }
    }

    /// Takes over the pages that are still there, which must be right. From then on they are in the order of
    /// the model.
    fn learn(&mut self) {
        let mut before = std::mem::take(&mut self.model.pages);
        before.sort_by_key(|page| page.rank);
        // After another request, a use of any page counts.
        (self.model.now, self.model.ahead) = (self.store().len().expect("an open store"), 0);
        assert_eq!(self.store().look_up(&[ABSENT]).expect("an open store"), 0);
        self.model.begin_request(1);
        for page in before {
            let page = Page::new(page.number, page.fill, page.rank);
            let (number, is_known) = (page.number, self.has(page.number));
            if let Some(found) = self.get(&[number]).remove(0) {
                assert_eq!(found, bytes(number, page.fill), "page {number}");
                self.model.pages.push(page);
            }
            self.model.touch(&[number]);
            if is_known && self.model.find(number).is_none() {
                // Until its damage is seen, it counts as used.
                self.model.pass();
                self.model.last = Some((self.model.prompts, 1));
            }
        }
    }

    fn reopen(&mut self) {
        self.store = None;
        self.model.last = None;
        self.open().expect("files of a store");
    }
}

fn step(source: &mut Source<'_>, world: &mut World) {
    let numbers: Vec<usize> = (0..source.below(MOST + 1)).map(|_| source.below(KEYS)).collect();
    match source.below(16) {
        0..=4 => {
            // Which pages are evicted is seen of one page alone, where the policy leaves a choice.
            let most = if matches!(world.model.policy, PolicyKind::Lru) { MOST } else { 1 };
            let numbers = &numbers[..numbers.len().min(most)];
            let fill = u8::try_from(source.below(200)).expect("small");
            let after = source.of(&[PutAfter::PreviousCall, PutAfter::PreviousCall, PutAfter::Nothing]);
            let present = world.put(numbers, fill, after);
            let known: Vec<bool> = numbers.iter().map(|&number| world.model.find(number).is_some()).collect();
            let World { model, store, .. } = world;
            let store = store.as_ref().expect("an open store");
            let put = model.put(numbers, fill, after, |number| !store.find(&[key(number)]).expect("open")[0]);
            for (at, &number) in numbers.iter().enumerate() {
                let is_first = put.contains(&number) && !numbers[..at].contains(&number);
                assert_eq!(present[at], known[at] || is_first);
            }
        }
        5..=7 => {
            let found = world.get(&numbers);
            for (found, &number) in found.into_iter().zip(&numbers) {
                let expected = world.model.find(number).map(|at| world.model.pages[at].fill);
                assert_eq!(found, expected.map(|fill| bytes(number, fill)), "page {number}");
            }
            if !numbers.is_empty() {
                world.model.touch(&numbers);
            }
        }
        of @ 8..=9 => {
            let leading = numbers.iter().take_while(|&&number| world.model.find(number).is_some()).count();
            let (store, keys, is_use) = (world.store(), keys(&numbers), of == 8);
            let found = if is_use { store.look_up(&keys) } else { store.exists(&keys) };
            assert_eq!(found.expect("open"), leading);
            if is_use && !numbers.is_empty() {
                world.model.begin_request(numbers.len());
                world.model.touch(&numbers[..leading]);
            }
        }
        10 => {
            let before = world.model.pages.len();
            world.model.pages.retain(|page| !numbers.contains(&page.number));
            world.model.last = None;
            let removed = world.store().remove(&keys(&numbers)).expect("open");
            assert_eq!(removed, before - world.model.pages.len());
        }
        11 if source.rarely(4) => {
            assert_eq!(world.store().clear().expect("open"), world.model.pages.len());
            world.model.pages.clear();
            world.model.last = None;
        }
        11 => {
            world.reopen();
            assert_eq!(world.store().len().expect("open"), world.model.pages.len());
            let before = world.model.pages.len();
            world.learn();
            assert_eq!(world.model.pages.len(), before, "nothing was damaged");
        }
        12 => {
            let before = world.model.pages.len();
            world.model.slots = 1 + source.below(8);
            world.reopen();
            world.learn();
            assert_eq!(world.model.pages.len(), before.min(world.model.slots));
        }
        13 => damage(source, world),
        _ => fail(source, world, &numbers),
    }
}

/// Changes bytes of the files while the store is closed.
fn damage(source: &mut Source<'_>, world: &mut World) {
    world.store = None;
    world.model.last = None;
    let mut files = world.disk.files();
    for _ in 0..=source.below(4) {
        let file = if source.flip() { &mut files.pages } else { &mut files.index };
        if file.is_empty() {
            continue;
        }
        let at = source.below(file.len());
        match source.below(8) {
            0 => file.truncate(at),
            1 => file.resize(file.len() + source.below(2 * BLOCK), 0xa5),
            2 => {
                // An entry, or a page, in the place of another.
                let (from, len) = (source.below(file.len()) / 64 * 64, source.of(&[64, 64, BLOCK]));
                let piece = file[from..file.len().min(from + len)].to_vec();
                let to = (at / 64 * 64).min(file.len() - piece.len());
                file[to..to + piece.len()].copy_from_slice(&piece);
            }
            _ => file[at] ^= 1 << source.below(8),
        }
    }
    drop(files);
    if let Err(error) = world.open() {
        assert_eq!(error.kind(), ErrorKind::Config, "{error}");
        // The header is damaged: nothing is believed, and nothing is overwritten.
        world.disk = Arc::default();
        world.model.pages.clear();
        world.open().expect("a new disk");
    }
    world.learn();
}

/// Lets one call fail, or kills the process there.
fn fail(source: &mut Source<'_>, world: &mut World, numbers: &[usize]) {
    let fault = match source.below(4) {
        0 => Fault::Error(source.of(&[
            io::ErrorKind::Other,
            io::ErrorKind::StorageFull,
            io::ErrorKind::Interrupted,
        ])),
        1 => Fault::Short(source.below(200)),
        _ => Fault::Killed(source.of(&[0, 1, 32, 63, 64, 100, BLOCK - 1, BLOCK])),
    };
    let fill = u8::try_from(source.below(200)).expect("small");
    world.disk.files().fault = Some((source.below(3 * MOST), fault));
    let what = source.below(4);
    match what {
        0 | 1 => {
            world.put(numbers, fill, PutAfter::PreviousCall);
        }
        2 => {
            world.get(numbers);
        }
        _ => {
            let _ = world.store().remove(&keys(numbers)).expect("open");
        }
    }
    let is_killed = {
        let mut files = world.disk.files();
        files.fault = None;
        files.is_killed
    };
    if is_killed {
        world.store = None;
        world.disk.files().is_killed = false;
        world.open().expect("what a killed process left");
    }
    let before = world.model.pages.len();
    // Pages that were put may be there and may have evicted others; pages that were got or removed may be
    // missing.
    if what < 2 {
        for &number in numbers {
            if world.model.find(number).is_none() {
                world.model.pages.push(Page::new(number, fill, (world.model.prompts, Reverse(0))));
            }
        }
    }
    let most_lost = if is_killed || what == 3 { before } else { numbers.len().max(1) };
    world.check();
    // Pages that were removed may be back, and a full disk is tried anew.
    world.reopen();
    world.learn();
    assert!(world.model.pages.len() + most_lost >= before.min(world.model.slots));
}
