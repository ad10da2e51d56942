//! A scheduler loop: requests share prefixes, are preempted when slots are short, and resume from the cache.

use std::collections::VecDeque;
use std::hash::{DefaultHasher, Hasher};
use std::sync::Arc;

use kvpool::base::{DType, Error, IndexVec, Result};
use kvpool::cache::{Namespace, PolicyKind, WritePolicy};
use kvpool::kernels::{Indices, read_indices};
use kvpool::memory::{Backend, Host, Region, Stream};
use kvpool::pool::{
    AllocatorConfig, Batch, BatchPlanner, Field, HostTier, HostTierConfig, KvConfig, KvLayout, KvPool, Lease,
    LowerTier, Plan, PlannerConfig, Prefix, PrefixCache, PrefixCacheConfig, PrefixCounts, Publication,
    ReqToTokenConfig, ReqToTokenPool, Scales, TokenToKvPoolAllocator,
};
use kvpool::tensor::TensorView;

const SLOTS: usize = 128;
const PAGE_SIZE: usize = 4;
const MAX_REQUESTS: usize = 8;
const MAX_LEN: usize = 64;
const STREAM: Stream = Stream::DEFAULT;

/// A prompt, then what was generated. It is done when it has `end` tokens.
#[derive(Clone)]
struct Request {
    tokens: Vec<i32>,
    end: usize,
}

/// A request with a row of the table, slots and a lease. Its last token has no slot yet.
struct Running {
    request: Request,
    row: i64,
    lease: Arc<Lease>,
}

struct Engine {
    kv: Arc<KvPool>,
    table: Arc<ReqToTokenPool>,
    planner: Arc<BatchPlanner>,
    cache: PrefixCache,
    steps: usize,
    preemptions: usize,
}

/// The scheduler.
impl Engine {
    fn serve(&mut self, mut waiting: VecDeque<Request>) -> Result<Vec<Request>> {
        let (mut running, mut done) = (Vec::<Running>::new(), Vec::new());
        while !waiting.is_empty() || !running.is_empty() {
            while let Some(request) = waiting.front()
                && let Some(started) = self.start(request.clone())?
            {
                waiting.pop_front();
                running.push(started);
            }
            let plan = loop {
                if running.is_empty() {
                    return Err(Error::state("a request needs more slots than there are"));
                }
                let rows = IndexVec::I64(running.iter().map(|one| one.row).collect());
                let lens = IndexVec::I64(running.iter().map(|one| len(&one.request.tokens)).collect());
                // A slot each. If they are short, the call evicts what no request holds, and tries again.
                if let Some(plan) = self.planner.decode(&rows, &lens, 1, None, STREAM)? {
                    break plan;
                }
                waiting.push_back(self.stop(running.pop().expect("it is not empty"))?);
                self.preemptions += 1;
            };
            let last: Vec<_> = running.iter().filter_map(|one| one.request.tokens.last().copied()).collect();
            self.forward(&last, &plan)?;
            self.steps += 1;
            for one in &mut running {
                one.request.tokens.push(self.sample(one)?);
            }
            for one in running.extract_if(.., |one| one.request.tokens.len() >= one.request.end) {
                done.push(self.stop(one)?);
            }
        }
        Ok(done)
    }

    /// Computes what is not cached of the tokens of a request. `None` if there is no row or too few slots.
    fn start(&self, request: Request) -> Result<Option<Running>> {
        let tokens = request.tokens.as_slice();
        // The last token is computed in any case: the next one follows from it.
        let lease = self.cache.match_prefix(&Namespace::Unnamed, &tokens, tokens.len() - 1, STREAM)?;
        if let Some(load) = lease.load(lease.loadable()?, STREAM)? {
            load.wait_layer(0, STREAM)?; // a model of many layers waits before each
        }
        let cached = lease.len()?;
        let Some(rows) = self.table.alloc(1, STREAM)? else { return Ok(None) };
        let row = i64::from(rows[0]);
        let batch = Batch {
            rows: &IndexVec::I64(vec![row]),
            prefix_lens: &[len(&tokens[..cached])],
            seq_lens: &[len(tokens)],
            prefixes: &[Prefix::Leased(Arc::clone(&lease))],
        };
        let Some(plan) = self.planner.extend(batch, STREAM)? else {
            self.table.free(batch.rows, STREAM)?;
            return Ok(None);
        };
        self.forward(&tokens[cached..], &plan)?;
        // Requests that start from now on find it.
        lease.publish(&Publication { tokens: &&tokens[cached..], slots: None, state: None }, STREAM)?;
        let mut one = Running { request, row, lease };
        one.request.tokens.push(self.sample(&one)?);
        Ok(Some(one))
    }

    /// Ends a request that is done or preempted: the cache keeps its whole pages, the planner frees the rest.
    fn stop(&self, one: Running) -> Result<Request> {
        let tokens = &one.request.tokens;
        let new = &tokens[one.lease.len()?..tokens.len() - 1];
        one.lease.finish_request(&Publication { tokens: &new, slots: None, state: None }, STREAM)?;
        Ok(one.request)
    }
}

/// In place of a model of one layer: K of a token is the token, and the next token follows from K of all.
impl Engine {
    fn forward(&self, tokens: &[i32], plan: &Plan) -> Result<()> {
        let slots = self.planner.field(plan, Field::OutCacheLoc)?.expect("every planner builds it");
        let region = Arc::new(Region::copy_of(tokens)?);
        let k = TensorView::contiguous(region, 0, DType::I32, &[tokens.len(), 1, 1])?;
        let slots = Indices::of(slots.borrow(), None)?;
        self.kv.set_kv(0, &slots, [k.borrow(), k.borrow()], Scales::default(), STREAM)
    }

    fn sample(&self, one: &Running) -> Result<i32> {
        let slots = self.table.read(one.row, len(&one.request.tokens))?;
        let [k, _] = self.kv.gather_kv(0, &Indices::of(slots.borrow(), None)?)?;
        Ok(next_token(read_indices(&k.borrow())?.iter()))
    }
}

fn next_token(keys: impl Iterator<Item = i64>) -> i32 {
    i32::try_from(keys.fold(0, |sum, key| (31 * sum + key) % 50_021)).expect("it is below 50,021")
}

fn len(tokens: &[i32]) -> i64 {
    i64::try_from(tokens.len()).expect("a length fits")
}

/// Names pages in host memory. Take BLAKE3 or SHA-256, which nobody can make collide.
fn digest(parts: &[&[u8]]) -> [u8; 32] {
    let mut key = [0; 32];
    for (part, salt) in key.chunks_exact_mut(8).zip(0..) {
        let mut hasher = DefaultHasher::new();
        hasher.write_u8(salt);
        parts.iter().for_each(|bytes| hasher.write(bytes));
        part.copy_from_slice(&hasher.finish().to_le_bytes());
    }
    key
}

fn engine() -> Result<Engine> {
    let host: Arc<dyn Backend> = Arc::new(Host);
    let config = AllocatorConfig { page_size: PAGE_SIZE, ..AllocatorConfig::new(SLOTS) };
    let slots = Arc::new(TokenToKvPoolAllocator::new(&config, &host)?);
    let table = Arc::new(ReqToTokenPool::new(&ReqToTokenConfig::new(MAX_REQUESTS, MAX_LEN), &host)?);
    let config = PlannerConfig::new(MAX_REQUESTS, MAX_LEN);
    let planner = BatchPlanner::new(&config, &host, Arc::clone(&slots), Arc::clone(&table))?;
    let config = KvConfig {
        size: SLOTS,
        layer_num: 1,
        k_head_num: 1,
        k_head_dim: 1,
        v_head_num: 1,
        v_head_dim: 1,
        dtype: DType::I32,
        page_size: PAGE_SIZE,
        layout: KvLayout::Split,
        pin_memory: false,
    };
    let kv = Arc::new(KvPool::new(&config, &host)?);
    let config = HostTierConfig {
        size: 8 * SLOTS,
        max_states: 0,
        write: WritePolicy::Back,
        pin_memory: false,
        page_lock_threads: 1,
        staging_bytes: 0,
    };
    let tier = LowerTier { host: Arc::new(HostTier::new(&config, &kv, None, &host)?), digest, store: None };
    let config = PrefixCacheConfig {
        policy: PolicyKind::Adaptive,
        cost: None,
        max_pinned: 0.5,
        name: "prefixes".into(),
        events: None,
    };
    let cache = PrefixCache::new(config, slots, None, Some(tier))?;
    Ok(Engine { kv, table, planner, cache, steps: 0, preemptions: 0 })
}

fn main() -> Result<()> {
    let mut engine = engine()?;
    // Six conversations of two turns that share a system prompt.
    let prompt = |user: i32| (100..116).chain(1000 * user..1000 * user + 6).collect();
    let mut requests: Vec<Request> = (1..7).map(|user| Request { tokens: prompt(user), end: 0 }).collect();
    for turn in 0..2 {
        for request in &mut requests {
            request.tokens.extend([7, 8, 9 + turn]);
            request.end = request.tokens.len() + 10;
        }
        let prompts = requests.clone();
        requests = engine.serve(requests.into())?;
        requests.sort_by_key(|request| request.tokens[16]);
        for (Request { mut tokens, end }, served) in prompts.into_iter().zip(&requests) {
            while tokens.len() < end {
                tokens.push(next_token(tokens.iter().map(|&token| token.into())));
            }
            assert_eq!(served.tokens, tokens, "the same as without a cache");
        }
    }
    let Engine { steps, preemptions, cache, .. } = engine;
    let PrefixCounts { hit_tokens, loaded, .. } = cache.counts();
    println!("{steps} steps, {preemptions} preemptions");
    println!("{hit_tokens} tokens found in the cache, {loaded} loaded from host memory");
    assert!(preemptions > 0 && hit_tokens > 0 && loaded > 0);
    cache.verify(STREAM)
}
