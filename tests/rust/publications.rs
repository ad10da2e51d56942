//! Publications of requests to a prefix cache, and those that are refused.

use std::sync::Arc;

use kvpool::base::{DType, ErrorKind, IndexVec};
use kvpool::cache::{Namespace, PolicyKind};
use kvpool::kernels::read_indices;
use kvpool::memory::{Backend, Host, Stream};
use kvpool::pool::{
    AllocatorConfig, GdnConfig, GdnPool, Grant, Lease, PrefixCache, PrefixCacheConfig, Publication,
    TokenToKvPoolAllocator,
};

const STREAM: Stream = Stream::DEFAULT;

struct Scene {
    slots: Arc<TokenToKvPoolAllocator>,
    cache: PrefixCache,
}

impl Scene {
    /// A cache of eight pages of two slots, and of as many snapshots.
    fn new(snapshots: usize) -> Self {
        let host: Arc<dyn Backend> = Arc::new(Host);
        let config = AllocatorConfig { strict: true, page_size: 2, ..AllocatorConfig::new(16) };
        let slots = Arc::new(TokenToKvPoolAllocator::new(&config, &host).unwrap());
        let states = GdnConfig {
            max_reqs: 1,
            num_gdn_layers: 1,
            num_v_heads: 1,
            head_k_dim: 1,
            head_v_dim: 1,
            conv_dim: 1,
            conv_kernel_size: 2,
            dtype: DType::BF16,
            max_track_slots: snapshots,
            strict: true,
        };
        let states = (snapshots > 0).then(|| Arc::new(GdnPool::new(&states, &host).unwrap()));
        let config = PrefixCacheConfig {
            policy: PolicyKind::Lru,
            cost: None,
            max_pinned: 0.5,
            name: "cache".into(),
            events: None,
        };
        let cache = PrefixCache::new(config, Arc::clone(&slots), states, None).unwrap();
        Self { slots, cache }
    }

    fn lease(&self, prompt: &[i32]) -> Arc<Lease> {
        self.cache.match_prefix(&Namespace::Unnamed, &prompt, prompt.len(), STREAM).unwrap()
    }

    /// The slots of `count` tokens.
    fn take(&self, count: usize) -> IndexVec {
        let taken = self.slots.alloc(count, STREAM).unwrap().map(Grant::keep).expect("there is room");
        read_indices(&taken.borrow()).unwrap()
    }

    /// Publishes tokens with a state at their end.
    fn publish(&self, lease: &Lease, tokens: &[i32]) {
        let slots = self.take(tokens.len());
        let publication = Publication { tokens: &tokens, slots: Some(&slots), state: Some(1) };
        lease.publish(&publication, STREAM).unwrap();
    }

    /// How much of a prompt a request can resume from.
    fn usable(&self, prompt: &[i32]) -> usize {
        self.cache.cached_len(&Namespace::Unnamed, &prompt, STREAM).unwrap()
    }
}

#[test]
fn a_finished_request_keeps_nothing() {
    let scene = Scene::new(0);
    let tokens: &[i32] = &[1, 2, 3];
    let leases = [scene.lease(tokens), scene.lease(tokens)];
    let finished = leases.each_ref().map(|lease| lease.finish(&tokens, &scene.take(3), STREAM).unwrap());
    assert_eq!(finished.map(|done| (done.length, done.duplicates, done.pages.len())), [(2, 0, 1), (2, 2, 1)]);
    for lease in leases {
        assert_eq!(lease.len().unwrap_err().kind(), ErrorKind::Stale);
    }
    let (tree, counts) = (scene.cache.tree_stats(STREAM), scene.cache.counts());
    assert_eq!((tree.cached, tree.locked), (2, 0));
    assert_eq!((counts.published, counts.duplicates), (2, 2));
    // The page that is not full was freed, too.
    assert_eq!(scene.slots.stats().in_use, 2);
}

#[test]
fn tokens_of_a_page_that_is_not_full_are_checked() {
    let scene = Scene::new(0);
    let (tokens, slots): (&[i32], _) = (&[1, 2, -1], scene.take(3));
    let publication = Publication { tokens: &tokens, slots: Some(&slots), state: None };
    let error = scene.lease(&[]).publish(&publication, STREAM).unwrap_err();
    assert_eq!((error.kind(), error.facts().index), (ErrorKind::Argument, Some(-1)));
    assert_eq!(scene.cache.tree_stats(STREAM).cached, 0);
}

#[test]
fn no_snapshot_is_given_up_for_a_state_that_does_not_exist() {
    let scene = Scene::new(1);
    scene.publish(&scene.lease(&[]), &[1, 2]);
    let (tokens, slots): (&[i32], _) = (&[3, 4], scene.take(2));
    let publication = Publication { tokens: &tokens, slots: Some(&slots), state: Some(9) };
    let error = scene.lease(&[]).publish(&publication, STREAM).unwrap_err();
    assert_eq!((error.kind(), error.facts().index), (ErrorKind::Index, Some(9)));
    assert_eq!(scene.usable(&[1, 2]), 2);
}

#[test]
fn the_snapshot_that_a_later_one_of_its_request_supersedes_goes_first() {
    let scene = Scene::new(3);
    let (older, request) = (scene.lease(&[]), scene.lease(&[]));
    scene.publish(&older, &[1, 2]);
    scene.publish(&request, &[3, 4]);
    scene.publish(&request, &[5, 6]);
    older.release(STREAM);
    // There is none free: the one at 3, 4 is given up, although that at 1, 2 is older.
    scene.publish(&scene.lease(&[]), &[7, 8]);
    assert_eq!(
        [&[1, 2][..], &[3, 4], &[3, 4, 5, 6], &[7, 8]].map(|tokens| scene.usable(tokens)),
        [2, 0, 4, 2]
    );
    // Then the oldest ones, but none of a lease.
    scene.publish(&scene.lease(&[]), &[9, 10]);
    scene.publish(&scene.lease(&[]), &[11, 12]);
    assert_eq!(
        [&[1, 2][..], &[3, 4, 5, 6], &[7, 8], &[9, 10], &[11, 12]].map(|tokens| scene.usable(tokens)),
        [0, 4, 0, 2, 2]
    );
    scene.cache.verify(STREAM).unwrap();
}

#[test]
fn a_snapshot_that_another_request_resumes_from_is_not_superseded() {
    let scene = Scene::new(3);
    let (older, request) = (scene.lease(&[]), scene.lease(&[]));
    scene.publish(&older, &[1, 2]);
    scene.publish(&request, &[3, 4]);
    scene.publish(&request, &[5, 6]);
    drop(older);
    drop(scene.lease(&[3, 4]));
    scene.publish(&scene.lease(&[]), &[7, 8]);
    assert_eq!(
        [&[1, 2][..], &[3, 4], &[3, 4, 5, 6], &[7, 8]].map(|tokens| scene.usable(tokens)),
        [0, 2, 4, 2]
    );
    scene.cache.verify(STREAM).unwrap();
}

#[test]
fn a_use_of_a_longer_prefix_is_one_of_the_snapshots_on_its_way() {
    let scene = Scene::new(3);
    scene.publish(&scene.lease(&[]), &[1, 2]);
    scene.publish(&scene.lease(&[]), &[3, 4]);
    scene.publish(&scene.lease(&[1, 2]), &[5, 6]);
    for prompt in [&[3, 4][..], &[1, 2, 5, 6]] {
        drop(scene.lease(prompt));
    }
    scene.publish(&scene.lease(&[]), &[7, 8]);
    assert_eq!(
        [&[1, 2][..], &[3, 4], &[1, 2, 5, 6], &[7, 8]].map(|tokens| scene.usable(tokens)),
        [2, 0, 4, 2]
    );
    scene.cache.verify(STREAM).unwrap();
}

#[test]
fn chunks_of_a_prompt_do_not_push_out_the_prompts_before() {
    let scene = Scene::new(4);
    let prompts: [[i32; 8]; 2] = [[1, 2, 3, 4, 5, 6, 7, 8], [11, 12, 13, 14, 15, 16, 17, 18]];
    for prompt in &prompts {
        let request = scene.lease(prompt);
        for chunk in prompt.chunks(2) {
            scene.publish(&request, chunk);
        }
    }
    // Both keep their last one, and every second one before.
    let found = prompts.map(|prompt| [2, 4, 6, 8].map(|end| scene.usable(&prompt[..end])));
    assert_eq!(found, [[0, 4, 4, 8], [0, 4, 4, 8]]);
    scene.cache.verify(STREAM).unwrap();
}

#[test]
fn a_snapshot_saves_the_tokens_from_the_one_before_it() {
    let scene = Scene::new(4);
    let long: [i32; 10] = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10];
    let request = scene.lease(&long);
    for (begin, end) in [(0, 6), (6, 8), (8, 10)] {
        scene.publish(&request, &long[begin..end]);
    }
    drop(request);
    // Where two prompts part, between the others.
    let fork = scene.lease(&[1, 2, 3, 4, 20, 21]);
    scene.publish(&fork, &[1, 2, 3, 4]);
    scene.publish(&fork, &[20, 21]);
    // What was 6 tokens from the beginning is 2 tokens from the fork, as the one after it.
    assert_eq!([4, 6, 8, 10].map(|end| scene.usable(&long[..end])), [4, 4, 8, 10]);
    scene.cache.verify(STREAM).unwrap();
}

#[test]
fn the_snapshot_at_the_end_of_a_prompt_is_not_superseded() {
    let scene = Scene::new(3);
    scene.publish(&scene.lease(&[]), &[5, 6]);
    let request = scene.lease(&[1, 2]);
    scene.publish(&request, &[1, 2]);
    scene.publish(&request, &[3, 4]);
    scene.publish(&scene.lease(&[]), &[7, 8]);
    assert_eq!(
        [&[1, 2][..], &[1, 2, 3, 4], &[5, 6], &[7, 8]].map(|tokens| scene.usable(tokens)),
        [2, 4, 0, 2]
    );
}

#[test]
fn a_request_gives_up_its_own_snapshot_unless_another_is_superseded() {
    let scene = Scene::new(3);
    let [first, second] = [scene.lease(&[]), scene.lease(&[])];
    scene.publish(&first, &[1, 2]);
    scene.publish(&first, &[3, 4]);
    scene.publish(&second, &[5, 6]);
    scene.publish(&second, &[7, 8]);
    assert_eq!([&[1, 2][..], &[1, 2, 3, 4], &[5, 6]].map(|tokens| scene.usable(tokens)), [0, 4, 2]);
    // The one at 5, 6 is superseded, and goes for that of a third request.
    scene.publish(&scene.lease(&[]), &[9, 10]);
    assert_eq!([&[5, 6][..], &[5, 6, 7, 8], &[9, 10]].map(|tokens| scene.usable(tokens)), [0, 4, 2]);
    scene.cache.verify(STREAM).unwrap();
}

#[test]
fn a_request_that_went_on_without_a_state_gives_up_its_own_snapshot() {
    let scene = Scene::new(2);
    scene.publish(&scene.lease(&[]), &[5, 6]);
    let request = scene.lease(&[]);
    scene.publish(&request, &[1, 2]);
    let (tokens, slots): (&[i32], _) = (&[3, 4], scene.take(2));
    request.publish(&Publication { tokens: &tokens, slots: Some(&slots), state: None }, STREAM).unwrap();
    scene.publish(&request, &[7, 8]);
    assert_eq!([&[5, 6][..], &[1, 2], &[1, 2, 3, 4, 7, 8]].map(|tokens| scene.usable(tokens)), [2, 0, 6]);
    scene.cache.verify(STREAM).unwrap();
}

#[test]
fn a_restore_makes_a_snapshot_worth_no_more() {
    for restores in [&[][..], &[9], &[1]] {
        let scene = Scene::new(2);
        let long: [i32; 8] = [1, 2, 3, 4, 5, 6, 7, 8];
        let request = scene.lease(&long);
        scene.publish(&request, &long[..4]);
        scene.publish(&request, &long[4..6]);
        for &row in restores {
            let answer = request.restore(row, STREAM).map_err(|error| error.kind());
            assert_eq!(answer, if row == 1 { Ok(()) } else { Err(ErrorKind::Index) });
        }
        // The second one saves two tokens, and the first one four.
        scene.publish(&request, &long[6..]);
        assert_eq!([4, 6, 8].map(|end| scene.usable(&long[..end])), [4, 4, 8], "after {restores:?}");
    }
}
