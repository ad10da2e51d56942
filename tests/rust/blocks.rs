//! Blocks of an engine: the queue of free ones and the map of hashes, compared with naive ones.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::Mutex;

use kvpool::base::{BlockId, Id, widen};
use kvpool::cache::{PolicyKind, SessionId, WaitingId, WaitingRank};
use kvpool::engines::{
    AfterTurn, BlockBytes, BlockHash, BlockMap, BlockTable, EvictionQueue, HashedBlocks, HashedTokens,
    NotTaken, QueueEnd, RunEnds, TakenBlocks, last_run,
};
use proptest::prelude::*;

const COUNT: u32 = 8;

fn block() -> impl Strategy<Value = BlockId> + Clone {
    (0..COUNT).prop_map(BlockId::new)
}

/// All blocks.
fn blocks() -> impl Iterator<Item = BlockId> {
    (0..COUNT).map(BlockId::new)
}

fn at(block: BlockId) -> usize {
    widen(block.number())
}

#[derive(Clone, Debug)]
enum Move {
    PopFront,
    Remove(BlockId),
    PushBack(BlockId),
    PushFront(BlockId),
}

fn moved() -> impl Strategy<Value = Move> {
    prop_oneof![
        Just(Move::PopFront),
        block().prop_map(Move::Remove),
        block().prop_map(Move::PushBack),
        block().prop_map(Move::PushFront),
    ]
}

/// A block of the naive table.
#[derive(Clone, Debug, Default)]
struct Plain {
    uses: i64,
    is_null: bool,
    hash: Option<u8>,
}

#[derive(Clone, Debug)]
enum Call {
    Take(usize),
    UndoTake(usize),
    Release(Vec<BlockId>, HashedBlocks),
    Retain(Vec<BlockId>),
    SetHash(BlockId, u8),
    TakeHash(BlockId),
    SetUses(BlockId, i64),
    SetNull(BlockId, bool),
    RemoveFree(BlockId),
}

fn call() -> impl Strategy<Value = Call> {
    let (count, block) = (0..5_usize, block());
    let blocks = prop::collection::vec(block.clone(), 0..5);
    let hashed = prop_oneof![Just(HashedBlocks::Last), Just(HashedBlocks::First)];
    prop_oneof![
        5 => count.clone().prop_map(Call::Take),
        1 => count.prop_map(Call::UndoTake),
        5 => (blocks.clone(), hashed).prop_map(|(blocks, hashed)| Call::Release(blocks, hashed)),
        4 => blocks.prop_map(Call::Retain),
        4 => (block.clone(), any::<u8>()).prop_map(|(block, hash)| Call::SetHash(block, hash)),
        2 => block.clone().prop_map(Call::TakeHash),
        1 => (block.clone(), -1..3_i64).prop_map(|(block, uses)| Call::SetUses(block, uses)),
        1 => (block.clone(), any::<bool>()).prop_map(|(block, is)| Call::SetNull(block, is)),
        1 => block.prop_map(Call::RemoveFree),
    ]
}

/// What a naive policy knows of a block: the one before it in its prompt, when it was used last, which session
/// alone has used it, whether it is used again, and the waiting requests that need it.
#[derive(Clone, Debug)]
struct Naive {
    before: Option<BlockId>,
    used: usize,
    user: Option<u8>,
    is_ended: bool,
    needed_by: Vec<WaitingId>,
}

/// What a naive policy knows of a session: where its last turn ended, and what it does, if a turn has said so.
#[derive(Clone, Copy, Debug, Default)]
struct NaiveSession {
    tail: Option<BlockId>,
    ends: Option<bool>,
}

/// A request: its blocks, and the session of which it is a turn.
type Running = (Vec<BlockId>, Option<u8>);

/// An engine whose prompts are paths in a tree: the hash of a block is its path.
struct Engine {
    table: BlockTable,
    hashed: BTreeMap<Vec<u8>, BlockId>,
    known: BTreeMap<BlockId, Naive>,
    sessions: BTreeMap<u8, NaiveSession>,
    running: Vec<Running>,
    /// The waiting queue, with what each request asks for.
    waiting: Vec<(WaitingId, Vec<u8>)>,
    now: usize,
}

fn session(number: u8) -> SessionId {
    SessionId::new(u64::from(number) + 1)
}

/// The tokens of blocks.
fn tokens(blocks: usize) -> u32 {
    64 * u32::try_from(blocks).unwrap()
}

impl Engine {
    fn new(policy: PolicyKind) -> Self {
        let mut table = BlockTable::new(COUNT);
        table.evict_by(policy, 64);
        let (hashed, known, sessions) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        Self { table, hashed, known, sessions, running: Vec::new(), waiting: Vec::new(), now: 0 }
    }

    /// A block that is no longer known is behind no other, and a turn ended before it.
    fn unknow(&mut self, block: BlockId) {
        let before = self.known.remove(&block).and_then(|gone| gone.before.map(|before| (before, gone.user)));
        for (number, state) in &mut self.sessions {
            if state.tail == Some(block) {
                state.tail = before
                    .filter(|(before, user)| *user == Some(*number) && self.known[before].user == *user)
                    .map(|(before, _)| before);
            }
        }
        for other in self.known.values_mut() {
            other.before = other.before.filter(|&before| before != block);
        }
    }

    fn forget(&mut self, block: BlockId) {
        self.unknow(block);
        self.hashed.retain(|_, other| *other != block);
        self.table.take_hash(block);
    }

    /// Uses blocks for a request of a session, or of none.
    fn retain(&mut self, blocks: &[BlockId], user: Option<u8>, missing: Range<u32>) {
        self.table.set_user(user.map(session), missing);
        self.table.retain(blocks).unwrap();
        for block in blocks {
            if let Some(known) = self.known.get_mut(block) {
                let other = known.user.filter(|&other| user == Some(other));
                (known.used, known.user, known.is_ended) = (self.now, other, false);
            }
        }
    }

    /// The blocks from one to the beginning of its prompt, as far as they are known.
    fn path(&self, from: Option<BlockId>) -> Vec<BlockId> {
        std::iter::successors(from, |block| self.known[block].before).collect()
    }

    /// Ends a turn of a session.
    fn end_turn(&mut self, number: u8, blocks: &[BlockId], ends: Option<bool>) {
        let after = match ends {
            None => AfterTurn::Unknown,
            Some(false) => AfterTurn::Pause("user"),
            Some(true) => AfterTurn::End,
        };
        self.table.end_turn(session(number), blocks, after);
        let mut state = self.sessions.get(&number).copied().unwrap_or_default();
        let last = blocks.iter().rev().copied().find(|block| self.known.contains_key(block));
        let is_own = |engine: &Self, block: &BlockId| engine.known[block].user == Some(number);
        let (old, new) = (self.path(state.tail), self.path(last));
        if last.is_some_and(|last| !old.contains(&last)) {
            for block in old {
                if !new.contains(&block) && is_own(self, &block) && self.table.queue().contains(block) {
                    self.known.get_mut(&block).unwrap().is_ended = true;
                }
            }
            state.tail = last.filter(|last| is_own(self, last));
        }
        // A turn that says nothing leaves what another one has said meanwhile.
        for said in [state.ends.filter(|_| last.is_some()), ends].into_iter().flatten() {
            for block in self.path(state.tail) {
                if is_own(self, &block) {
                    self.known.get_mut(&block).unwrap().is_ended = said;
                }
            }
        }
        state.ends = ends.or(state.ends);
        self.sessions.insert(number, state);
    }

    /// Adds a request for a prompt at an end of those of its rank in the waiting queue.
    fn wait(&mut self, path: &[u8], rank: WaitingRank, end: QueueEnd) {
        let blocks = self.cached(path);
        let request = self.table.add_waiting(&blocks, rank, end);
        self.need(request, &blocks);
        let place = self.waiting.partition_point(|(other, _)| match end {
            QueueEnd::Front => other.rank() < rank,
            QueueEnd::Back => other.rank() <= rank,
        });
        self.waiting.insert(place, (request, path.to_vec()));
    }

    /// Looks the prompt of a waiting request up again.
    fn look_again(&mut self, index: prop::sample::Index) {
        let (request, path) = self.waiting[index.index(self.waiting.len())].clone();
        let blocks = self.cached(&path);
        self.table.extend_waiting(request, &blocks);
        self.need(request, &blocks);
    }

    fn cached(&self, path: &[u8]) -> Vec<BlockId> {
        (1..=path.len()).map_while(|len| self.hashed.get(&path[..len]).copied()).collect()
    }

    fn need(&mut self, request: WaitingId, blocks: &[BlockId]) {
        for block in blocks {
            if let Some(known) = self.known.get_mut(block) {
                known.needed_by.push(request);
            }
        }
    }

    /// Removes a request from the waiting queue.
    fn stop_waiting(&mut self, index: prop::sample::Index) {
        let (request, _) = self.waiting.remove(index.index(self.waiting.len()));
        self.table.remove_waiting(request);
        for known in self.known.values_mut() {
            known.needed_by.retain(|&other| other != request);
        }
    }

    /// The known blocks that are free and have no known block behind them.
    fn leaves(&self) -> Vec<BlockId> {
        let is_last = |block| self.known.values().all(|other| other.before != Some(block));
        self.known
            .keys()
            .copied()
            .filter(|&block| self.table.queue().contains(block) && is_last(block))
            .collect()
    }

    /// Takes a block, which must be the one that a naive policy allows.
    fn take(&mut self, policy: PolicyKind) -> BlockId {
        let (front, leaves) = (self.table.queue().front().unwrap(), self.leaves());
        let taken = self.table.pop().unwrap();
        if self.known.contains_key(&front) && !leaves.is_empty() {
            // Those that have ended, then those of the policy, then those that the last waiting request needs.
            let place_of = |block: &BlockId| {
                let known = &self.known[block];
                let place = self.waiting.iter().position(|(request, _)| known.needed_by.contains(request));
                (!known.is_ended || place.is_some(), place.map(|place| self.waiting.len() - place))
            };
            let first = leaves.iter().map(place_of).min().unwrap();
            let leaves: Vec<_> = leaves.into_iter().filter(|block| place_of(block) == first).collect();
            assert!(leaves.contains(&taken), "{taken:?} is none of {leaves:?}");
            let (is_judged, is_needed) = (first.0, first.1.is_some());
            if !is_needed && (!is_judged || matches!(policy, PolicyKind::Lru)) {
                let used = |block: &BlockId| self.known[block].used;
                assert_eq!(used(&taken), leaves.iter().map(used).min().unwrap());
            }
        } else {
            assert_eq!(taken, front);
        }
        self.forget(taken);
        self.table.set_uses(taken, 1);
        taken
    }

    fn prompt(&mut self, path: &[u8], user: Option<u8>, policy: PolicyKind) {
        let hit = |len: &usize| self.hashed.get(&path[..*len]).copied();
        let mut blocks: Vec<BlockId> = (1..=path.len()).map_while(|len| hit(&len)).collect();
        let found = blocks.len();
        let free = blocks.iter().filter(|&&block| self.table.queue().contains(block)).count();
        if path.len() - found > self.table.queue().len() - free {
            return;
        }
        self.retain(&blocks, user, tokens(found)..tokens(path.len()));
        blocks.extend((found..path.len()).map(|_| self.take(policy)).collect::<Vec<_>>());
        for (len, &block) in (1..).zip(&blocks).skip(found) {
            self.table.set_hash(block, HashedTokens { hash: path[..len].into(), tokens: None });
            self.hashed.insert(path[..len].to_vec(), block);
            let before =
                len.checked_sub(2).map(|at| blocks[at]).filter(|block| self.known.contains_key(block));
            self.known.insert(
                block,
                Naive { before, used: self.now, user, is_ended: false, needed_by: Vec::new() },
            );
        }
        let before = found.checked_sub(1).map(|at| blocks[at]);
        self.table.add_prompt(before, &blocks[found..], user.map(session));
        self.table.look_up(64 * path.len() as u64, user.map(session));
        self.table.set_user(None, 0..0);
        self.now += path.len();
        if let Some(state) = user.and_then(|number| self.sessions.get_mut(&number)) {
            state.ends = None;
        }
        self.running.push((blocks, user));
    }
}

#[derive(Clone, Debug)]
enum EngineStep {
    Prompt(Vec<u8>, Option<u8>),
    End(prop::sample::Index, Option<bool>),
    Say(u8, bool),
    TakeHash(BlockId),
    Share(prop::sample::Index),
    Undo(usize),
    Wait(Vec<u8>, WaitingRank, QueueEnd),
    LookAgain(prop::sample::Index),
    StopWaiting(prop::sample::Index),
}

fn engine_step() -> impl Strategy<Value = EngineStep> {
    prop_oneof![
        6 => (prop::collection::vec(0..3_u8, 1..5), prop::option::of(0..3_u8))
            .prop_map(|(path, user)| EngineStep::Prompt(path, user)),
        6 => (any::<prop::sample::Index>(), prop::option::of(any::<bool>()))
            .prop_map(|(index, ends)| EngineStep::End(index, ends)),
        1 => (0..3_u8, any::<bool>()).prop_map(|(number, ends)| EngineStep::Say(number, ends)),
        1 => block().prop_map(EngineStep::TakeHash),
        1 => any::<prop::sample::Index>().prop_map(EngineStep::Share),
        1 => (0..4_usize).prop_map(EngineStep::Undo),
        2 => (prop::collection::vec(0..3_u8, 1..5), 0..2_i64, 0..2_i64, any::<bool>()).prop_map(
            |(path, priority, arrival, is_first)| {
                let end = if is_first { QueueEnd::Front } else { QueueEnd::Back };
                EngineStep::Wait(path, WaitingRank { priority, arrival }, end)
            }
        ),
        2 => any::<prop::sample::Index>().prop_map(EngineStep::LookAgain),
        2 => any::<prop::sample::Index>().prop_map(EngineStep::StopWaiting),
    ]
}

proptest! {
    #[test]
    fn a_policy_takes_the_ends_of_prompts(
        steps in prop::collection::vec(engine_step(), 1..300),
        policy in prop_oneof![Just(PolicyKind::Lru), Just(PolicyKind::Adaptive), Just(PolicyKind::Slru)],
    ) {
        let mut engine = Engine::new(policy);
        for step in steps {
            match step {
                EngineStep::Prompt(path, user) => engine.prompt(&path, user, policy),
                EngineStep::End(index, ends) if !engine.running.is_empty() => {
                    let (mut blocks, user) = engine.running.swap_remove(index.index(engine.running.len()));
                    if let Some(number) = user {
                        engine.end_turn(number, &blocks, ends);
                    }
                    blocks.reverse();
                    prop_assert_eq!(engine.table.release(&blocks, HashedBlocks::Last).dropped(), 0);
                }
                EngineStep::Share(index) if !engine.running.is_empty() => {
                    let (blocks, _) = engine.running[index.index(engine.running.len())].clone();
                    engine.retain(&blocks, None, 0..0);
                    engine.running.push((blocks, None));
                }
                EngineStep::Say(number, ends) => engine.end_turn(number, &[], Some(ends)),
                EngineStep::TakeHash(block) => engine.forget(block),
                EngineStep::Wait(path, rank, end) => engine.wait(&path, rank, end),
                EngineStep::LookAgain(index) if !engine.waiting.is_empty() => engine.look_again(index),
                EngineStep::StopWaiting(index) if !engine.waiting.is_empty() => engine.stop_waiting(index),
                EngineStep::Undo(count) => {
                    // What is given back is free, in front, and has kept its hash; the policy knows it no longer.
                    let before: Vec<BlockId> = engine.table.queue().iter().collect();
                    let shared = Mutex::new(std::mem::replace(&mut engine.table, BlockTable::new(1)));
                    let taken = TakenBlocks::take(&shared, count);
                    let blocks = taken.as_ref().map_or(Vec::new(), |taken| taken.blocks().to_vec());
                    drop(taken);
                    engine.table = shared.into_inner().unwrap();
                    prop_assert!(engine.table.queue().iter().take(blocks.len()).eq(blocks.iter().copied()));
                    prop_assert_eq!(engine.table.queue().len(), before.len());
                    for block in blocks {
                        engine.unknow(block);
                    }
                }
                EngineStep::End(..)
                | EngineStep::Share(_)
                | EngineStep::LookAgain(_)
                | EngineStep::StopWaiting(_) => {}
            }
        }
        // Everything can be taken, each block once.
        for (blocks, _) in std::mem::take(&mut engine.running) {
            prop_assert_eq!(engine.table.release(&blocks, HashedBlocks::Last).dropped(), 0);
        }
        let taken: std::collections::BTreeSet<_> = (0..COUNT).map(|_| engine.take(policy)).collect();
        prop_assert_eq!((taken.len(), engine.table.pop()), (widen(COUNT), None));
    }

    #[test]
    fn a_table_is_naive_blocks_and_a_naive_queue(calls in prop::collection::vec(call(), 1..120)) {
        let mut shared = Mutex::new(BlockTable::new(COUNT));
        let mut plain = vec![Plain::default(); widen(COUNT)];
        let mut free: VecDeque<BlockId> = blocks().collect();
        for call in calls {
            let table = shared.get_mut().unwrap();
            match call {
                Call::Take(count) | Call::UndoTake(count) => {
                    let used = free.iter().take(count).find(|&&block| plain[at(block)].uses != 0);
                    let expected = match used {
                        _ if count > free.len() => Err(NotTaken::Short { free: free.len() }),
                        Some(&block) => Err(NotTaken::InUse { block, uses: plain[at(block)].uses }),
                        None => Ok(free.iter().take(count).copied().collect::<Vec<_>>()),
                    };
                    let taken = TakenBlocks::take(&shared, count);
                    prop_assert_eq!(taken.as_ref().map(TakenBlocks::blocks), expected.as_deref());
                    if let (Call::Take(_), Ok(taken)) = (&call, taken) {
                        taken.keep();
                        for block in free.drain(..count) {
                            plain[at(block)].uses = 1;
                        }
                    }
                }
                Call::Release(blocks, hashed) => {
                    let (mut dropped, mut first) = (0, Vec::new());
                    for block in &blocks {
                        let state = &mut plain[at(*block)];
                        match state.uses {
                            _ if state.is_null => {}
                            ..=0 => dropped += 1,
                            1 if hashed == HashedBlocks::Last && state.hash.is_some() => {
                                state.uses = 0;
                                if !free.contains(block) { free.push_back(*block) }
                            }
                            1 => { state.uses = 0; first.push(*block) }
                            _ => state.uses -= 1,
                        }
                    }
                    for block in first.into_iter().rev() {
                        if !free.contains(&block) { free.push_front(block) }
                    }
                    prop_assert_eq!(table.release(&blocks, hashed).dropped(), dropped);
                }
                Call::Retain(blocks) => {
                    let is_lost = |&&block: &&BlockId| {
                        let state = &plain[at(block)];
                        !state.is_null && state.uses <= 0 && !free.contains(&block)
                    };
                    let lost = blocks.iter().find(is_lost).copied();
                    prop_assert_eq!(table.retain(&blocks), lost.map_or(Ok(()), Err));
                    for block in blocks.into_iter().filter(|_| lost.is_none()) {
                        let state = &mut plain[at(block)];
                        if !state.is_null {
                            if state.uses <= 0 { free.retain(|&other| other != block) }
                            state.uses = state.uses.max(0) + 1;
                        }
                    }
                }
                Call::SetHash(block, hash) => {
                    let hashed = HashedTokens { hash: [hash][..].into(), tokens: None };
                    let place = &mut plain[at(block)].hash;
                    prop_assert_eq!(table.set_hash(block, hashed), place.is_none());
                    place.get_or_insert(hash);
                }
                Call::TakeHash(block) => {
                    let taken = table.take_hash(block).map(|hashed| hashed.hash.as_bytes()[0]);
                    prop_assert_eq!(taken, plain[at(block)].hash.take());
                }
                Call::SetUses(block, uses) => {
                    table.set_uses(block, uses);
                    plain[at(block)].uses = uses;
                }
                Call::SetNull(block, is_null) => {
                    table.set_null(block, is_null);
                    plain[at(block)].is_null = is_null;
                }
                Call::RemoveFree(block) => {
                    prop_assert_eq!(table.remove_free(block), free.contains(&block));
                    free.retain(|&other| other != block);
                }
            }
            let table = shared.get_mut().unwrap();
            prop_assert!(table.queue().iter().eq(free.iter().copied()));
            for (block, state) in blocks().zip(&plain) {
                let hash = table.hashed(block).map(|hashed| hashed.hash.as_bytes()[0]);
                prop_assert_eq!((table.uses(block), table.is_null(block), hash), (state.uses, state.is_null, state.hash));
            }
        }
    }

    #[test]
    fn the_last_run_is_the_naive_one(
        found in prop::collection::vec(prop::bool::weighted(0.8), 0..60),
        need in 0..8_usize, period in 1..5_usize, first in 0..2_usize,
    ) {
        let ends: Vec<usize> = (0..=found.len()).filter(|end| *end >= first && (end - first) % period == 0).collect();
        let is_run = |end: &&usize| **end >= need.max(1) && found[*end - need.max(1)..**end].iter().all(|&is| is);
        let expected = ends.iter().rfind(is_run).map_or_else(
            || {
                let front = found.iter().take(need.max(1)).take_while(|&&is| is).count();
                0..ends.iter().copied().filter(|&end| end <= front).max().unwrap_or(0)
            },
            |&end| end - need.max(1)..end,
        );
        let mut asked = vec![0_u8; found.len()];
        let run = last_run(found.len(), need, RunEnds { period, first }, |at| { asked[at] += 1; found[at] });
        prop_assert_eq!(&run, &expected);
        let often = asked.into_iter().max().unwrap_or(0);
        let is_whole = run.len() == need.max(1);
        prop_assert!(often <= 2 - u8::from(is_whole), "asked {often} times");
    }

    #[test]
    fn a_queue_is_a_naive_queue(moves in prop::collection::vec(moved(), 1..200)) {
        let mut queue = EvictionQueue::full(COUNT);
        let mut plain: VecDeque<BlockId> = blocks().collect();
        for step in moves {
            match step {
                Move::PopFront => prop_assert_eq!(queue.pop_front(), plain.pop_front()),
                Move::Remove(number) => {
                    prop_assert_eq!(queue.remove(number), plain.contains(&number));
                    plain.retain(|&other| other != number);
                }
                Move::PushBack(number) | Move::PushFront(number) => {
                    let is_new = !plain.contains(&number);
                    if matches!(step, Move::PushBack(_)) {
                        prop_assert_eq!(queue.push_back(number), is_new);
                        if is_new { plain.push_back(number) }
                    } else {
                        prop_assert_eq!(queue.push_front(number), is_new);
                        if is_new { plain.push_front(number) }
                    }
                }
            }
            prop_assert_eq!((queue.len(), queue.is_empty()), (plain.len(), plain.is_empty()));
            prop_assert!(blocks().all(|number| queue.contains(number) == plain.contains(&number)));
            prop_assert_eq!((queue.front(), queue.back()), (plain.front().copied(), plain.back().copied()));
            prop_assert!(queue.iter().eq(plain.iter().copied()));
            for (&one, &next) in plain.iter().zip(plain.iter().skip(1)) {
                prop_assert_eq!((queue.after(one), queue.before(next)), (Some(next), Some(one)));
            }
        }
    }

    #[test]
    fn a_map_is_a_naive_list(steps in prop::collection::vec((0..3_usize, 0..5_i64, 0..9_u32), 1..200)) {
        // Hashes of no bytes, of as many as are stored inline, and of more.
        let hashes = [&[][..], &[7; 36], &[7; 39]];
        let mut map = BlockMap::default();
        let mut plain: Vec<(usize, i64, usize)> = Vec::new();
        for (at, (hash, block, kind)) in steps.into_iter().enumerate() {
            let place = plain.iter().position(|&(of, number, _)| (of, number) == (hash, block));
            prop_assert_eq!(map.contains(hashes[hash], block), place.is_some());
            match (kind, place) {
                (0, _) => {
                    map.clear();
                    plain.clear();
                }
                (1..=4, _) => {
                    prop_assert_eq!(map.remove(hashes[hash], block), place.map(|place| plain.remove(place).2));
                }
                (_, Some(place)) => {
                    let old = std::mem::replace(&mut plain[place].2, at);
                    prop_assert_eq!(map.insert(hashes[hash], block, at), Some(old));
                }
                (_, None) => {
                    prop_assert_eq!(map.insert(hashes[hash], block, at), None);
                    plain.push((hash, block, at));
                }
            }
            for (number, hash) in hashes.iter().enumerate() {
                let of_it = || plain.iter().filter(move |entry| entry.0 == number);
                prop_assert!(map.blocks(hash).eq(of_it().map(|(_, block, value)| (*block, value))));
                prop_assert_eq!(map.first(hash), of_it().next().map(|(.., value)| value));
            }
            let mut found: Vec<_> = map.hashes().map(BlockHash::as_bytes).collect();
            found.sort_unstable_by_key(|hash| hash.len());
            let held = |number: &usize| plain.iter().any(|entry| entry.0 == *number);
            prop_assert!(found.into_iter().eq((0..3).filter(held).map(|number| hashes[number])));
            prop_assert_eq!(map.is_empty(), plain.is_empty());
        }
    }
}

#[test]
fn bytes_that_python_would_write_otherwise_are_not_written() {
    let mut bytes = Vec::new();
    for kind in [BlockBytes::Pickle, BlockBytes::Cbor] {
        assert!(kind.write(&[0; 255], &[0, i32::MAX], &mut bytes));
        assert!(!kind.write(&[0; 256], &[0], &mut bytes));
        assert!(!kind.write(&[0; 32], &[5, -1], &mut bytes));
    }
    // A frame holds less than 64 KiB: here all but one token of five bytes fit.
    let around = (65_536 - 48) / 5;
    let fits = |count| BlockBytes::Pickle.write(&[0; 32], &vec![i32::MAX; count], &mut Vec::new());
    assert!(fits(around - 5));
    assert!(!fits(around + 5));
    assert!(BlockBytes::Cbor.write(&[0; 32], &vec![i32::MAX; around + 5], &mut bytes));
}
