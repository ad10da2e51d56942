//! Units on their way to the store.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, Weak};

use crate::base::{ForkGate, KeySet, Result, run_blocking};
use crate::cache::Namespace;
use crate::layout::GroupKind;
use crate::pool::StoreTransfer;
use crate::pool::arena_host_tier::Soundness;
use crate::pool::arena_prefix_cache::ArenaLease;
use crate::pool::arena_prefix_cache::leased::{end_of, units_of};
use crate::transfer::JobThread;

use super::{KeptPrefix, Named, StoreLink};

/// Prefixes that wait until the store can take them. More are not stored.
const WAITING: usize = 1024;

/// What is on its way to a store.
#[derive(Debug, Default)]
pub(super) struct Outgoing {
    /// Prefixes that wait, in their order, by their tokens: they may be evicted meanwhile.
    waiting: VecDeque<(Namespace, Vec<i32>)>,
    puts: Vec<Put>,
    /// Whether the thread sends some.
    is_sending: bool,
}

/// A put in progress.
#[derive(Debug)]
struct Put {
    transfer: Arc<StoreTransfer>,
    pieces: Vec<Named>,
    bytes: usize,
}

/// Pieces that a store reads. When it is done with them, more are sent.
#[derive(Debug)]
struct SentPieces {
    prefix: KeptPrefix,
    link: Weak<StoreLink>,
    thread: Arc<JobThread>,
}

impl Drop for SentPieces {
    fn drop(&mut self) {
        let (link, _gate) = (self.link.clone(), ForkGate::enter_on_own_thread());
        drop(self.prefix.0.take());
        // A thread of the store must not become the last owner of the link. Without a thread, the next call sends more.
        let _ = self.thread.submit(move || link.upgrade().iter().for_each(StoreLink::send_waiting));
    }
}

impl StoreLink {
    /// Has a thread put what the store lacks of a prefix of the tier.
    pub(in crate::pool::arena_prefix_cache) fn put(
        self: &Arc<Self>,
        namespace: &Namespace,
        tokens: Vec<i32>,
    ) {
        let has_ends = self.groups().iter().any(|group| group.kind() != GroupKind::Full);
        let mut outgoing = self.outgoing.lock();
        let waiting = &mut outgoing.waiting;
        if !has_ends {
            // What waits of the same request goes with it.
            waiting.retain(|(name, earlier)| name != namespace || !tokens.starts_with(earlier));
        }
        waiting.push_back((namespace.clone(), tokens));
        let dropped = if waiting.len() > WAITING { waiting.pop_front() } else { None };
        drop(outgoing);
        self.give_up(dropped);
        self.wake();
    }

    /// Has the thread send what waits, if the store can take some.
    fn wake(self: &Arc<Self>) {
        {
            let mut outgoing = self.outgoing.lock();
            if outgoing.waiting.is_empty() || outgoing.is_sending {
                return;
            }
            outgoing.is_sending = true;
        }
        let link = Arc::clone(self);
        if self.puts.submit(move || link.send_waiting()).is_err() {
            let left = {
                let mut outgoing = self.outgoing.lock();
                outgoing.is_sending = false;
                std::mem::take(&mut outgoing.waiting)
            };
            self.give_up(left);
        }
    }

    /// Sends prefixes that wait: as many as may be on their way at once, at most half of the tier.
    fn send_waiting(self: &Arc<Self>) {
        loop {
            self.settle();
            let gate = ForkGate::enter_on_own_thread();
            let next = {
                let mut outgoing = self.outgoing.lock();
                let bytes: usize = outgoing.puts.iter().map(|put| put.bytes).sum();
                let room = (self.tier.mem_bytes() / 2).saturating_sub(bytes);
                let next = if room > 0 { outgoing.waiting.pop_front() } else { None };
                outgoing.is_sending = next.is_some();
                next.map(|next| (next, room))
            };
            drop(gate);
            let Some(((namespace, tokens), room)) = next else { return };
            if let Ok(false) = self.send(&namespace, &tokens, room) {
                // The rest follows when the store is done with the first.
                let _gate = ForkGate::enter_on_own_thread();
                let mut outgoing = self.outgoing.lock();
                outgoing.waiting.push_front((namespace, tokens));
                outgoing.is_sending = false;
                return;
            }
        }
    }

    /// Puts what the store lacks of a prefix, in `room` bytes, and records a use of the rest. Returns whether it was all.
    fn send(self: &Arc<Self>, namespace: &Namespace, tokens: &[i32], room: usize) -> Result<bool> {
        let keys = self.keys_of(namespace, tokens);
        let gate = ForkGate::enter_on_own_thread();
        let prefix = KeptPrefix(Some(ArenaLease::without_use(&self.below, namespace, &tokens)?));
        let lease = prefix.0.as_ref().expect("it was just made");
        let len = lease.len()?;
        let units = units_of(&self.below, lease, 0..len)?;
        // The tier has evicted the others.
        self.count_unstored(self.pieces_of(tokens.len()).saturating_sub(self.pieces_of(len)));
        drop(gate);
        let mut all = self.named(&units, 0..len, &keys);
        let present = self.store.touch(&self.names_of(&all));
        let present = present.inspect_err(|_| self.count_unstored(all.len()))?;
        let mut present = self.whole(&all, &present).into_iter();
        all.retain(|_| !present.next().unwrap_or(false));
        let is_sending = self.drop_sent(&mut all);
        self.keep_sound(&mut all, 0..len);
        let mut bytes = 0;
        let fitting = all.iter().take_while(|piece| {
            bytes += self.tier.piece_bytes(piece.group);
            bytes <= room
        });
        // One at least, however small the tier.
        let count = fitting.count().max(usize::from(!is_sending)).min(all.len());
        let is_all = count == all.len();
        all.truncate(count);
        if all.is_empty() {
            return Ok(is_all);
        }
        let bytes = all.iter().map(|piece| self.tier.piece_bytes(piece.group)).sum();
        let sent = SentPieces { prefix, link: Arc::downgrade(self), thread: Arc::clone(&self.puts) };
        let rows = self.rows(&all, Arc::new(sent));
        let transfer = rows.and_then(|rows| self.store.put(self.names_of(&all), rows));
        let transfer = transfer.inspect_err(|_| self.count_unstored(all.len()))?;
        let _gate = ForkGate::enter_on_own_thread();
        self.outgoing.lock().puts.push(Put { transfer, pieces: all, bytes });
        Ok(is_all)
    }

    /// Drops the pieces that are on their way already. Returns whether any are.
    fn drop_sent(&self, pieces: &mut Vec<Named>) -> bool {
        let _gate = ForkGate::enter_on_own_thread();
        let outgoing = self.outgoing.lock();
        let sent: KeySet<_> =
            outgoing.puts.iter().flat_map(|put| put.pieces.iter().map(Named::name)).collect();
        pieces.retain(|piece| !sent.contains(&piece.name()));
        !sent.is_empty()
    }

    /// Returns the number of pieces that a prefix has in the store.
    fn pieces_of(&self, len: usize) -> usize {
        if len == 0 { 0 } else { self.wanted(0..len, |_| true).iter().flatten().flatten().count() }
    }

    /// Counts prefixes that are not stored.
    fn give_up(&self, waiting: impl IntoIterator<Item = (Namespace, Vec<i32>)>) {
        for (_, tokens) in waiting {
            self.count_unstored(self.pieces_of(tokens.len()));
        }
    }

    fn count_unstored(&self, pieces: usize) {
        let _gate = ForkGate::enter_on_own_thread();
        self.tier.count(|counts| counts.unstored += pieces);
    }

    /// Drops the pieces that have other bytes than those that came.
    fn keep_sound(&self, pieces: &mut Vec<Named>, tokens: Range<usize>) {
        let _gate = ForkGate::enter_on_own_thread();
        let page_size = self.page_size();
        for (number, group) in self.groups().iter().enumerate() {
            let of_group: Vec<Named> = pieces.iter().filter(|piece| piece.group == number).copied().collect();
            let numbers: Vec<u32> = of_group.iter().map(|piece| piece.piece).collect();
            let name = |at: usize| end_of(group, page_size, of_group[at].position, tokens.clone()).1;
            let mut sound = self.tier.inspect(number, &numbers, name).into_iter();
            pieces.retain(|piece| piece.group != number || sound.next() == Some(Soundness::Sound));
        }
    }

    /// Ends the puts that are over, and sends more.
    pub(in crate::pool::arena_prefix_cache) fn settle_puts(self: &Arc<Self>) {
        self.settle();
        self.wake();
    }

    /// Ends the puts that are over.
    fn settle(&self) {
        let _gate = ForkGate::enter_on_own_thread();
        self.outgoing.lock().puts.retain(|put| {
            // In the child of a fork nothing is stored.
            let is_over = put.transfer.query().unwrap_or(true);
            if is_over {
                let present = self.whole(&put.pieces, &put.transfer.present().unwrap_or_default());
                let unstored = put.pieces.len() - present.iter().filter(|is_there| **is_there).count();
                self.tier.count(|counts| counts.unstored += unstored);
            }
            !is_over
        });
    }

    /// Returns whether nothing is on its way to the store.
    pub(in crate::pool::arena_prefix_cache) fn is_idle(self: &Arc<Self>) -> bool {
        self.settle_puts();
        let outgoing = self.outgoing.lock();
        outgoing.waiting.is_empty() && outgoing.puts.is_empty() && !outgoing.is_sending
    }

    /// Waits until what waits was passed to the store, as far as it takes it. Called when the cache is dropped.
    pub(in crate::pool::arena_prefix_cache) fn finish(self: &Arc<Self>) {
        let (sender, given) = std::sync::mpsc::channel::<()>();
        let link = Arc::clone(self);
        let send_all = move || {
            link.send_waiting();
            drop(sender);
        };
        // When the job is done or dropped, its end of the channel is dropped.
        let _ = self.puts.submit(send_all);
        let _ = run_blocking(move || given.recv());
        let left = std::mem::take(&mut self.outgoing.lock().waiting);
        self.give_up(left);
    }
}
