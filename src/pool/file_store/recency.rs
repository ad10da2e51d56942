//! The ticks of uses: which page is evicted before which. Knows no slots and no files.
//!
//! Of the pages of a prompt the last are evicted first, whatever the calls that bring them: a page is of use
//! only together with those before it. So the pages of a call have descending ticks, and the pages of a call
//! that continues a prompt have ticks below those of the earlier call. To leave room for these, ticks are
//! handed out in bands: a prompt begins at the top of a new one, and its pages go down.

use crate::cache::PageHash;
use crate::transfer::to_u64;

/// The ticks of a band, a power of two. The pages of a prompt beyond them share a tick; their order is known
/// until the process ends.
const BAND: u64 = 1 << 16;

/// Returns whether two ticks are of pages that were used last as parts of one prompt.
pub(super) const fn is_one_run(tick: u64, other: u64) -> bool {
    tick / BAND == other / BAND
}

/// What comes before the first page of a `put`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PutAfter {
    /// Unknown. Calls between two look-ups count as the parts of one prompt, and a look-up as the beginning of
    /// the prompt that it has found pages of: as long as the store has room for all of them.
    #[default]
    PreviousCall,
    /// Nothing: it is the first page of a prompt.
    Nothing,
    /// This page. Without it in the store, the pages are stored only where there is room.
    Page(PageHash),
}

/// The ticks of the pages of a call, which follow each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Recency {
    first: u64,
    floor: u64,
}

impl Recency {
    /// Returns the tick of a page of the call.
    pub(super) fn tick(self, page: usize) -> u64 {
        self.first.saturating_sub(to_u64(page)).max(self.floor)
    }

    /// Returns the ticks that follow those of `count` pages.
    fn after(self, count: usize) -> Self {
        Self { first: self.tick(count), floor: self.floor }
    }
}

/// The prompt that a call may continue: the ticks of its next pages, and the number of pages before them.
#[derive(Clone, Copy, Debug)]
struct Prompt {
    next: Recency,
    pages: usize,
}

/// The ticks that were handed out, and the prompt of the last call.
#[derive(Debug)]
pub(super) struct Ticks {
    /// The first tick of the next band.
    next_band: u64,
    last: Option<Prompt>,
}

impl Ticks {
    /// Creates ticks that are larger than `last`.
    pub(super) fn after(last: u64) -> Self {
        Self { next_band: (last + 1).next_multiple_of(BAND), last: None }
    }

    /// Returns ticks for `count` pages of a prompt, which become the last used, with room for pages behind
    /// them.
    fn begin(&mut self, count: usize) -> Recency {
        let span = (to_u64(count) + BAND / 2).next_multiple_of(BAND);
        let floor = self.next_band;
        self.next_band += span;
        Recency { first: self.next_band - 1, floor }
    }

    /// Returns ticks for the pages that a look-up has found: the next call may continue them. If it has found
    /// none, the next call begins a prompt.
    pub(super) fn look_up(&mut self, found: usize) -> Recency {
        let recency = self.begin(found);
        self.last = (found > 0).then(|| Prompt { next: recency.after(found), pages: found });
        recency
    }

    /// Returns ticks for pages that are used by themselves.
    pub(super) fn touch(&mut self, count: usize) -> Recency {
        self.begin(count)
    }

    /// Returns ticks for the `count` pages of a `put` after a page with the tick `parent`, if that is there.
    /// The store has room for `room` pages.
    pub(super) fn put(&mut self, count: usize, room: usize, after: PutAfter, parent: Option<u64>) -> Recency {
        let (recency, before) = match (after, parent, self.last) {
            (PutAfter::PreviousCall, _, Some(last)) if last.pages + count <= room => (last.next, last.pages),
            (PutAfter::PreviousCall | PutAfter::Nothing, ..) => (self.begin(count), 0),
            (PutAfter::Page(_), Some(tick), _) => {
                let floor = tick & !(BAND - 1);
                // It is that far from the top of its band.
                let before = usize::try_from(floor + BAND - tick).expect("a band is short");
                (Recency { first: tick, floor }.after(1), before)
            }
            (PutAfter::Page(_), None, _) => (Recency { first: 0, floor: 0 }, 0),
        };
        self.last = Some(Prompt { next: recency.after(count), pages: before + count });
        recency
    }

    /// Forgets the prompt of the last call.
    pub(super) fn end_prompt(&mut self) {
        self.last = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_that_follow_each_other_go_down_until_the_store_has_no_room() {
        let mut ticks = Ticks::after(7);
        let put = |ticks: &mut Ticks, count| ticks.put(count, 8, PutAfter::PreviousCall, None);
        let (first, second) = (put(&mut ticks, 4), put(&mut ticks, 4));
        assert!(first.tick(3) > second.tick(0) && second.tick(3) > 7);
        assert!(put(&mut ticks, 1).tick(0) > first.tick(0), "it would be the ninth page");
        let found = ticks.look_up(2);
        let rest = put(&mut ticks, 2);
        assert!(found.tick(1) > rest.tick(0) && rest.tick(1) > first.tick(0));
        ticks.look_up(0);
        assert!(put(&mut ticks, 1).tick(0) > found.tick(0), "another prompt");
        ticks.end_prompt();
        let last = put(&mut ticks, 1);
        assert!(ticks.put(1, 8, PutAfter::Nothing, None).tick(0) > last.tick(0));
    }

    #[test]
    fn pages_follow_the_one_that_is_named() {
        let mut ticks = Ticks::after(0);
        let one = ticks.put(3, 8, PutAfter::Nothing, None);
        let other = ticks.put(3, 8, PutAfter::Nothing, None);
        let rest = ticks.put(2, 8, PutAfter::Page([0; 32]), Some(one.tick(2)));
        assert!(one.tick(2) > rest.tick(0) && rest.tick(0) > rest.tick(1) && other.tick(2) > one.tick(0));
        // Five pages of the prompt are there, and the store has room for eight.
        let more = ticks.put(3, 8, PutAfter::PreviousCall, None);
        assert!(rest.tick(1) > more.tick(0));
        assert!(ticks.put(1, 8, PutAfter::PreviousCall, None).tick(0) > other.tick(0));
        assert_eq!(ticks.put(2, 8, PutAfter::Page([0; 32]), None).tick(1), 0, "nothing is before them");
        // Beyond its band, a prompt goes no lower.
        let long = ticks.put(1, 8, PutAfter::Nothing, None);
        let far = ticks.put(1 << 20, 1 << 30, PutAfter::PreviousCall, None);
        assert_eq!(far.tick(1 << 19), far.tick((1 << 20) - 1));
        assert!(far.tick(1 << 19) > rest.tick(0) && long.tick(0) > far.tick(0));
    }
}
