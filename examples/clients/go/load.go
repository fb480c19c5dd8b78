package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"sync/atomic"
	"time"
)

// counts has the numbers of started, ended and failed calls, and the number of received messages.
type counts struct {
	begun, ended, failed, messages atomic.Int64
}

// load makes many Generate calls over one channel, several at the same time, and counts them.
func load(ctx context.Context, c client) error {
	var counts counts
	start := time.Now()
	more := func() bool {
		if c.duration > 0 {
			return time.Since(start) < c.duration
		}
		return counts.begun.Add(1) <= c.calls
	}
	var workers sync.WaitGroup
	for range c.atOnce {
		workers.Go(func() {
			for ctx.Err() == nil && more() {
				counts.add(ctx, callOnce(ctx, c, &counts.messages))
			}
		})
	}
	workers.Wait()
	fmt.Printf("calls: %d, failed: %d, messages: %d, seconds: %.1f\n",
		counts.ended.Load(), counts.failed.Load(), counts.messages.Load(), time.Since(start).Seconds())
	if counts.failed.Load() > 0 {
		return errReported
	}
	return nil
}

// callOnce makes one call, and reads its stream to the end.
func callOnce(ctx context.Context, c client, messages *atomic.Int64) error {
	ctx, cancel := withDeadline(ctx, c.timeout)
	defer cancel()
	stream, err := c.Generate(ctx, c.generateRequest(c.texts[0]))
	if err != nil {
		return err
	}
	for {
		if _, err := stream.Recv(); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
		messages.Add(1)
	}
}

// add counts a call that ended with err. A cancelled call is not counted.
func (c *counts) add(ctx context.Context, err error) {
	if err != nil && ctx.Err() != nil {
		return
	}
	c.ended.Add(1)
	if err != nil {
		c.failed.Add(1)
		fmt.Fprint(os.Stderr, describe(err))
	}
}
